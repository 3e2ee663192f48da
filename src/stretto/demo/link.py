"""A slow network in front of a fast server: `Link` adds latency and caps the rate of each connection."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_PROXY = Path(__file__).with_name("proxy.py")
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What went through a link since it started."""

    num_connections: int
    """Connections that clients opened."""
    sent_bytes: int
    """Bytes delivered to clients."""


class Link:
    """Context manager around a TCP proxy in a process of its own, on 127.0.0.1 and a free port.

    Every method returns when its setting is in force. Bytes from the server to a client are capped, per connection;
    bytes to the server are delayed only.

    Args:
        target: the server, as `http://HOST:PORT` or `HOST:PORT`.
        delay_s: seconds each way. A request on an open connection takes two of them more, a new connection four.
        rate_bytes_per_s: for each connection, or None for no cap.

    Attributes:
        endpoint: `http://127.0.0.1:PORT` of the link.
        pid: of its process.
    """

    endpoint: str
    pid: int

    def __init__(self, target: str, *, delay_s: float = 0.0, rate_bytes_per_s: float | None = None) -> None:
        parts = urlsplit(target if "//" in target else f"//{target}")
        if parts.scheme not in ("", "http") or parts.hostname is None or parts.port is None:
            raise ValueError(f"target must be http://HOST:PORT or HOST:PORT, found {target!r}; give the port.")
        if not 0 <= delay_s < float("inf"):
            raise ValueError(
                f"delay_s must be 0 or more seconds each way, found {delay_s!r}; a cloud has about 0.01."
            )
        self._options = {"host": parts.hostname, "port": parts.port, "delay_s": delay_s}
        self._rate = _checked_rate(rate_bytes_per_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Start the proxy.

        Raises:
            RuntimeError: it runs already, or the process ended at once.
        """
        if self._process is not None:
            raise RuntimeError("This Link is open already; make another one for a second link.")
        options = self._options | {"rate": self._rate, "parent_pid": os.getpid()}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROXY), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C reaches the training first, which may still want to read.
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self.endpoint = f"http://127.0.0.1:{self._receive()['port']}"
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the proxy and every connection through it; nothing happens the second time."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Cap each connection at `bytes_per_s` from now on, or not at all (None)."""
        self._command(rate=_checked_rate(bytes_per_s))

    def pause(self) -> None:
        """Let no byte through, in either direction, until `resume`; connections stay open."""
        self._command(paused=True)

    def resume(self) -> None:
        """Let bytes through again; the pause is not made up for."""
        self._command(paused=False)

    def cut(self, after_bytes: int) -> None:
        """Break the one connection that delivers the `after_bytes`-th byte from now; for tests of recovery."""
        if after_bytes < 1:
            raise ValueError(f"after_bytes must be 1 or more, found {after_bytes!r}; 1 cuts at the next byte.")
        self._command(cut_bytes=after_bytes)

    def stats(self) -> LinkStats:
        """Return the counts so far."""
        reply = self._command()
        return LinkStats(num_connections=reply["connections"], sent_bytes=reply["sent_bytes"])

    def _command(self, **settings: Any) -> dict[str, Any]:
        with self._lock:
            if self._process is None:
                raise RuntimeError("This Link is not open; use it as `with Link(...) as link:`.")
            assert self._process.stdin is not None
            # If the process has ended, the read that follows says so.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), json.dumps(settings).encode() + b"\n")
            return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(
                f"The process of the link (pid {self._process.pid}) ended with exit code {code}; open a new Link. "
                "Its error is above, on stderr."
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


def _checked_rate(rate: float | None) -> float | None:
    if rate is not None and not 1 <= rate < float("inf"):
        raise ValueError(f"The rate must be 1 or more bytes per second or None, found {rate!r}; pause() stops all.")
    return rate
