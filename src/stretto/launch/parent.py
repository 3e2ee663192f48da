"""Runs a command with the hooks in every Python that it starts, and makes the record of what they saw."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from stretto.launch.options import RunOptions
from stretto.profile.build import Ending, build_record
from stretto.profile.schema import RunRecord

_INJECTED = Path(__file__).parent / "inject"
_FORWARDED = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
Tee = Callable[[bytes], None]


class Run:
    """A command that has run: its record, and the files that the record was made from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record: RunRecord


def run_script(command: list[str], options: RunOptions, *, tee: Tee | None = None) -> RunRecord:
    """Run `command` and return its record.

    Args:
        command: such as ["python", "train.py", "--lr", "0.1"]; a .py file is run by this Python, and "python" and
            other programs are looked for where this Python is, then on PATH.
        options: what the hooks do besides measuring.
        tee: called with each piece of what the command writes to stdout and stderr, which goes on to ours; None
            hands ours over as they are.

    Raises ValueError if there is no such program or script.
    """
    with script_run(command, options, tee=tee) as run:
        return run.record


@contextmanager
def script_run(command: list[str], options: RunOptions, *, tee: Tee | None = None) -> Iterator[Run]:
    """As `run_script`, with the row files there until the end of the `with` block."""
    arguments = _resolve(command)
    with tempfile.TemporaryDirectory(prefix="stretto-run-") as name:
        run = Run(Path(name))
        ending = Ending(command=command, options=options.to_json())
        ending.set_status(_run_child(arguments, _environment(run.directory, options), tee))
        run.record = build_record(run.directory, ending)
        yield run


def _resolve(command: list[str]) -> list[str]:
    """The program and its arguments. Raises ValueError if it, or the script it is to run, does not exist."""
    if not command:
        raise ValueError("there is no command: expected something like `stretto run -- python train.py`")
    if command[0].endswith(".py") and shutil.which(command[0]) is None:
        command = [sys.executable, *command]
    program = shutil.which(command[0], path=_path())
    if program is None:
        raise ValueError(f"{command[0]}: there is no such program on PATH")
    script = next((word for word in command[1:] if not word.startswith("-")), None)
    is_script = Path(program).name.startswith("python") and not {"-m", "-c", "-"} & set(command[1:2])
    if is_script and script is not None and script.endswith(".py") and not Path(script).exists():
        raise ValueError(f"{script}: there is no such script in {Path.cwd()}")
    return [program, *command[1:]]


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


def _run_child(arguments: list[str], environment: dict[str, str], tee: Tee | None) -> int:
    """Returns the exit status, the negative of a signal's number where one ended it."""
    output: Any = None if tee is None else subprocess.PIPE
    with _Forwarding() as forwarding:
        child = subprocess.Popen(arguments, env=environment, stdout=output, stderr=output)
        forwarding.to(child)
        pipes = [(child.stdout, sys.stdout), (child.stderr, sys.stderr)] if tee is not None else []
        copies = [threading.Thread(target=_copy, args=(source, target, tee)) for source, target in pipes]
        for copy in copies:
            copy.start()
        status = child.wait()
        for copy in copies:
            copy.join()
    return status


def _copy(source: IO[bytes], target: Any, tee: Tee) -> None:
    binary = getattr(target, "buffer", None)
    while chunk := os.read(source.fileno(), 1 << 16):
        tee(chunk)
        if binary is not None:
            binary.write(chunk)
            binary.flush()
        else:
            target.write(chunk.decode(errors="replace"))
    source.close()


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
