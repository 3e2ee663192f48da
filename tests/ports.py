"""A port that a test may give away."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which one process, which sets SO_REUSEADDR as a TCPStore does, can listen meanwhile.

    The system gives it to nobody else: it is bound here, where nothing listens.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
