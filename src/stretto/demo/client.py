"""Reads of an object store over one connection, from any process.

obstore runs its requests on threads that do not survive a fork: in a child forked after its first use every
request hangs. DataLoader's workers are forked, by default, from the very process that asks for `len(dataset)` or
trains with `num_workers=0` first. So there are two clients with the same method:

    worker process, obstore not in use before the fork  ->  DirectClient: requests in this process
    main process, or a worker forked after its use      ->  HelperClient: requests in a child started afresh (60 ms)

Run by path (`python client.py`) this file is that child: options and then names as JSON lines in, a JSON line and
the bytes out. It ends at the end of its input.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, S3Config

_FORKED_AFTER_USE = False


def _note_fork() -> None:
    global _FORKED_AFTER_USE  # noqa: PLW0603
    _FORKED_AFTER_USE = _FORKED_AFTER_USE or "obstore" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class ReadError(Exception):
    """A read failed; `permanent` if the store says that trying again is of no use."""

    def __init__(self, message: str, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class Client(Protocol):
    """Reads whole objects, one at a time."""

    def get(self, name: str) -> bytes:
        """Return the bytes of one object, or raise ReadError."""

    def close(self) -> None:
        """Let go of what the client holds."""


def open_store(
    url: str,
    *,
    endpoint: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    region: str | None = None,
    allow_http: bool | None = None,
    connect_timeout_s: float = 5.0,
    read_timeout_s: float = 20.0,
    timeout_s: float = 60.0,
) -> "ObjectStore":
    """Open a store by URL for requests over one connection, each tried once.

    Args:
        url: `s3://BUCKET/PREFIX` or `http(s)://HOST/PATH`.
        endpoint: of an S3-compatible store. Like the three after it, by default from AWS_ENDPOINT_URL,
            AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and their like.
        access_key: key of the S3 store.
        secret_key: the key's secret.
        region: of the S3 store.
        allow_http: connections without TLS; by default if the URL or the endpoint begins with `http://`.
        connect_timeout_s: seconds to connect.
        read_timeout_s: seconds without a byte after which a request fails.
        timeout_s: seconds for a whole request.

    Raises:
        RuntimeError: obstore is not installed.
        ValueError: a URL of another kind.
    """
    try:
        from obstore.store import HTTPStore, S3Store  # noqa: PLC0415  (an optional dependency)
    except ImportError as error:
        raise RuntimeError(
            "Reading from an object store needs obstore. Install it with: pip install 'stretto[store]'"
        ) from error
    parts = urlsplit(url)
    if parts.scheme not in ("s3", "http", "https") or not parts.netloc:
        raise ValueError(f"A store is s3://BUCKET/PREFIX or http(s)://HOST/PATH, found {url!r}.")
    given_endpoint = endpoint or next(
        (os.environ[k] for k in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if os.environ.get(k)),
        "",
    )
    address = url if parts.scheme != "s3" else given_endpoint
    plain = address.startswith("http://") if allow_http is None else allow_http
    client: ClientConfig = {
        "allow_http": plain,
        "http1_only": True,
        "pool_max_idle_per_host": "1",
        "connect_timeout": timedelta(seconds=connect_timeout_s),
        "read_timeout": timedelta(seconds=read_timeout_s),
        "timeout": timedelta(seconds=timeout_s),
    }
    host = urlsplit(address).hostname
    if host in ("127.0.0.1", "localhost", "::1"):
        # Else http_proxy in the environment catches even what stays on this machine; only with a proxy_url are
        # exceptions heeded.
        client |= {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": "127.0.0.1,localhost,::1"}
    if parts.scheme != "s3":
        return HTTPStore(url, client_options=client, retry_config={"max_retries": 0})
    config: S3Config = {}
    if endpoint is not None:
        config["endpoint"] = endpoint
    if access_key is not None:
        config["access_key_id"] = access_key
    if secret_key is not None:
        config["secret_access_key"] = secret_key
    if region is not None:
        config["region"] = region
    prefix = parts.path.strip("/") or None
    return S3Store(
        parts.netloc, prefix=prefix, config=config, client_options=client, retry_config={"max_retries": 0}
    )


def brief(error: BaseException) -> str:
    """What obstore says in one line; it appends a page of internals after an empty one."""
    return " ".join(str(error).split("\n\nDebug source")[0].split())


class DirectClient:
    """Requests in this process."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._store = open_store(url, **options)

    def get(self, name: str) -> bytes:
        """Return the bytes of one object, or raise ReadError."""
        import obstore  # noqa: PLC0415  (an optional dependency)
        from obstore import exceptions  # noqa: PLC0415

        permanent = (
            FileNotFoundError,
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            exceptions.InvalidPathError,
        )
        try:
            return obstore.get(self._store, name).bytes().to_bytes()
        except (exceptions.BaseError, OSError) as error:
            raise ReadError(brief(error), isinstance(error, permanent)) from error

    def close(self) -> None:
        """Do nothing: the connection ends with the object."""


class HelperClient:
    """Requests in a child process. After an exception in `get` other than ReadError, only `close` may follow."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        spec = importlib.util.find_spec("obstore")
        # -I keeps the environment's start-up hooks out; where obstore lies is told instead.
        folder = str(Path(spec.origin).parent.parent) if spec is not None and spec.origin is not None else ""
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        # A loader's background thread reads while the training asks for len().
        self._lock = threading.Lock()
        self._send({"folder": folder, "url": url, "options": options})

    def get(self, name: str) -> bytes:
        """Return the bytes of one object, or raise ReadError."""
        assert self._process.stdout is not None
        with self._lock:
            self._send(name)
            reply = json.loads(self._process.stdout.readline() or "{}")
            data = self._process.stdout.read(reply.get("size_bytes", 0))
        if "error" in reply:
            raise ReadError(reply["error"], reply["permanent"])
        if not reply or len(data) < reply["size_bytes"]:
            raise ReadError(f"the reading process ended with exit code {self._process.wait()}", permanent=False)
        return data

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process.stdin.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        # If the child has ended, the read that follows says so.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")


def connect(url: str, options: dict[str, Any], *, in_worker: bool) -> Client:
    """Return the client that works in this process."""
    kind = DirectClient if in_worker and not _FORKED_AFTER_USE else HelperClient
    return kind(url, options)


def _serve() -> None:
    setup = json.loads(sys.stdin.buffer.readline())
    if setup["folder"] not in sys.path:
        sys.path.append(setup["folder"])
    client: DirectClient | None = None
    for line in sys.stdin.buffer:
        try:
            client = client or DirectClient(setup["url"], setup["options"])
            data = client.get(json.loads(line))
            header: dict[str, Any] = {"size_bytes": len(data)}
        except ReadError as error:
            data, header = b"", {"error": str(error), "permanent": error.permanent}
        except Exception as error:  # reported where the read was asked for
            data, header = b"", {"error": f"{type(error).__name__}: {error}", "permanent": True}
        sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
