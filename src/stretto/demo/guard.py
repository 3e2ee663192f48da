"""Run one command for as long as another process lives: `guard.py PARENT_PID FOLDER SOCKET... -- COMMAND...`.

    parent --starts--> guard --starts--> command
      |                  |                  |
      dies or SIGTERM -> kills, removes  -> gone

A process of its own, because PR_SET_PDEATHSIG fires when the *thread* that forked ends and because
`preexec_fn` is unsafe with threads; the guard has one thread. It is run by path, with the standard library
only, so it starts in 20 ms and never imports torch. When the command ends by itself, the folder stays for the
parent to read the log.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def _die_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main(arguments: list[str]) -> int:
    """Start the command, wait until it or the parent ends, and return the command's exit code."""
    split = arguments.index("--")
    parent_pid, folder, *sockets = arguments[:split]
    signal.signal(signal.SIGTERM, _stop)
    child: subprocess.Popen[bytes] | None = None
    ended_alone = False
    try:
        child = subprocess.Popen(
            arguments[split + 1 :],
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_guard,  # noqa: PLW1509
        )
        while os.getppid() == int(parent_pid):
            code = child.poll()
            if code is not None:
                ended_alone = True
                return code
            time.sleep(_POLL_S)
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if child is not None:
            child.kill()
            child.wait()
        for socket in sockets:
            with contextlib.suppress(OSError):
                os.unlink(socket)
        if not ended_alone:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
