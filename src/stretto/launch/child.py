"""In the script's process, right after it has imported torch: the meter, and with --echo the echo."""

import atexit
import contextlib
import os
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
    atexit.register(meter.finish)
    _finish_before_exit(meter)


def _finish_before_exit(meter: Meter) -> None:
    """`os._exit` runs no handlers; forked processes end by it, those of multiprocessing too."""
    exit_now = os._exit

    def _exit(status: int) -> NoReturn:
        with contextlib.suppress(Exception):
            meter.finish(status)
        exit_now(status)

    os._exit = _exit
