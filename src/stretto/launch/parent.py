"""Runs a command with the hooks in every Python that it starts, and makes the record of what they saw."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from stretto.launch.options import RunOptions
from stretto.profile.build import Ending, build_record
from stretto.profile.schema import RunRecord

_LEAST_FREE_BYTES = 1 << 16
_INJECTED = Path(__file__).parent / "inject"
_FORWARDED = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]


@dataclass(frozen=True, slots=True)
class Run:
    """A command that has run."""

    record: RunRecord
    directory: Path
    """Of the files that the record was made from."""
    output: str
    """What it wrote to stdout and stderr, if that was captured."""


def run_script(command: list[str], options: RunOptions) -> RunRecord:
    """Run `command` and return its record. See `script_run`."""
    with script_run(command, options) as run:
        return run.record


@contextmanager
def script_run(command: list[str], options: RunOptions, *, capture: bool = False) -> Iterator[Run]:
    """Run `command`; its row files are there until the end of the `with` block.

    Args:
        command: such as ["python", "train.py", "--lr", "0.1"]; a .py file is run by this Python, and "python" and
            other programs are looked for where this Python is, then on PATH.
        options: what the hooks do besides measuring.
        capture: keep what the command writes to stdout and stderr, instead of letting it write to ours.

    Raises ValueError if there is no such program or script.
    """
    arguments = _resolve(command)
    # Processes that the command left behind may still write into the folder while it is removed.
    with tempfile.TemporaryDirectory(prefix="stretto-run-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        ending = Ending(command=command, options=options.to_json())
        status, output = _run_child(arguments, _environment(directory, options), capture=capture)
        ending.set_status(status)
        if shutil.disk_usage(directory).free < _LEAST_FREE_BYTES:
            ending.problem = f"the disk of {directory.parent} is full, so what was recorded is not all there"
        yield Run(build_record(directory, ending), directory, output)


def _resolve(command: list[str]) -> list[str]:
    """The program and its arguments. Raises ValueError if it, or the script it is to run, does not exist."""
    if not command:
        raise ValueError("there is no command: expected something like `stretto run -- python train.py`")
    if command[0].endswith(".py") and shutil.which(command[0]) is None:
        command = [sys.executable, *command]
    program = shutil.which(command[0], path=_path())
    if program is None:
        raise ValueError(f"{command[0]}: there is no such program on PATH")
    script = _script_of(command) if Path(program).name.startswith("python") else None
    if script is not None and not Path(script).exists():
        raise ValueError(f"{script}: there is no such script in {Path.cwd()}")
    return [program, *command[1:]]


def _script_of(command: list[str]) -> str | None:
    """The script that a Python is given, by its command line; None for -m, -c and the standard input."""
    words = iter(command[1:])
    for word in words:
        if word in ("-W", "-X"):  # the options that have a value of their own
            next(words, None)
        elif not word.startswith("-"):
            return word
        elif word.startswith(("-m", "-c")) or word == "-":
            return None
    return None


def _path() -> str:
    """PATH with this Python's folder in front, so that "python" and "torchrun" are those stretto belongs to."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _environment(directory: Path, options: RunOptions) -> dict[str, str]:
    paths = [str(_INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": _path(),
        "PYTHONPATH": os.pathsep.join(paths),
        **options.to_environment(directory),
        "STRETTO_RUN_PARENT": str(os.getpid()),
    }


def _run_child(arguments: list[str], environment: dict[str, str], *, capture: bool) -> tuple[int, str]:
    """Returns the exit status, the negative of a signal's number where one ended it, and the captured output."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if capture else {}
    with _Forwarding() as forwarding:
        child = subprocess.Popen(arguments, env=environment, **pipes)
        forwarding.to(child)
        output, _ = child.communicate()
    return child.returncode, (output or b"").decode(errors="replace")


class _Forwarding:
    """Hands signals on to the child. Ctrl-C on a terminal has reached it already: it is of the same group."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Forwarding":
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: the child ignores it too
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, child: subprocess.Popen[bytes]) -> None:
        """The child has started."""
        self._child = child
        for number in self._early:
            child.send_signal(number)

    def _received(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number in (signal.SIGINT, signal.SIGQUIT) and _is_on_terminal():
            return
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)


def _is_on_terminal() -> bool:
    """Whether this is the terminal's foreground group, which gets the signals of its keys."""
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno()) == os.getpgrp()  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return False


def end_as(record: RunRecord) -> int:
    """End as the script did: die of the signal that ended it, or return its exit code."""
    if (name := record["exit_signal"]) is not None:
        number = signal.Signals[name]
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), number)
        return 128 + number
    return record["exit_code"] or 0
