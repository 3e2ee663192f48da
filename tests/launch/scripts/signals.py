"""Says that it is ready, then waits for a signal; "handles" SIGTERM and SIGINT if its argument says so."""

import signal
import sys


def save(number: int, frame: object) -> None:
    print("saved after", signal.Signals(number).name, flush=True)
    sys.exit(7)


if sys.argv[1] == "handles":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
else:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
print("ready", flush=True)
while True:
    signal.pause()
