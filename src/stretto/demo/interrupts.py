"""Ctrl-C while worker processes start."""

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def interrupts_put_off() -> Generator[None, None, None]:
    """Let Ctrl-C wait until the end of the block, in which worker processes are forked.

    Python forgets an exception that a signal's handler raises in what it runs around a fork, and then the logging
    module's lock, which is taken there, is never given back: the next fork by another thread would wait for ever.
    """
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupted:
            signal.raise_signal(signal.SIGINT)
