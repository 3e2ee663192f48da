"""In the script's process, right after it has imported torch: the meter, and with --echo the echo."""

import atexit
import contextlib
import os
import sys
from typing import NoReturn

from stretto.launch.echoing import Echoing
from stretto.launch.options import RunOptions
from stretto.profile.hooks import Hooks
from stretto.profile.meter import Meter


def start() -> None:
    """Hook this process. The files are written as it goes and when it ends."""
    directory, options = RunOptions.from_environment()
    echoing = Echoing(options.echo) if options.echo is not None else None
    meter = Meter(directory, max_updates=options.steps, begin_echo=echoing)
    Hooks(meter, num_workers=options.workers, prefetch_factor=options.prefetch).install()
    atexit.register(lambda: meter.finish(_ending()))
    _finish_before_exit(meter)


def _ending(status: int = 0) -> str:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        return f"raised {type(error).__name__}: {error}"
    return f"exited with code {status}" if status else "finished"


def _finish_before_exit(meter: Meter) -> None:
    """`os._exit` runs no handlers; forked processes end by it, those of multiprocessing too."""
    exit_now = os._exit

    def _exit(status: int) -> NoReturn:
        with contextlib.suppress(Exception):
            meter.finish(_ending(status))
        exit_now(status)

    os._exit = _exit
