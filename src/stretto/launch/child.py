"""In the script's process, right after it has imported torch: the meter, and with --echo the echo."""

import atexit

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
