"""Nothing of the store and the link outlives the program, however that ends."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from stretto.demo.server import ObjectStore
from tests.patience import PATIENCE_S

PROGRAM = """
import json, psutil, time
from stretto.demo.link import Link
from stretto.demo.server import ObjectStore
with ObjectStore() as store, Link(store.endpoint) as link:
    print(json.dumps([store.pid, psutil.Process(store.pid).children()[0].pid, link.pid]), flush=True)
    time.sleep(6000)
"""
SIGNALS = (signal.SIGINT, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[dict[signal.Signals, subprocess.Popen[str]]]:
    """A Python program with a store and a link for each signal; all start at once, since that takes seconds."""
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    started = {number: subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for number in SIGNALS}
    yield started
    for program in started.values():
        program.kill()
        program.communicate()


def files_of(processes: list[psutil.Process]) -> list[Path]:
    """The folder and the Unix sockets of a running server, given as guard, server."""
    folder = Path(processes[0].cwd())
    sockets = [Path(one.laddr) for one in processes[1].net_connections("unix") if one.laddr.startswith("/")]
    assert len(sockets) >= 4
    assert all(path.exists() for path in [folder, *sockets])
    return [folder, *sockets]


def assert_gone(processes: list[psutil.Process], files: list[Path]) -> None:
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    assert [path for path in files if path.exists()] == []


def test_after_an_exception_no_process_and_no_file_is_left() -> None:
    with suppress(LookupError), ObjectStore() as store:
        guard = psutil.Process(store.pid)
        processes = [guard, *guard.children(recursive=True)]
        assert [one.name() for one in processes[1:]] == ["weed"]
        files = files_of(processes)
        raise LookupError
    assert_gone(processes, files)


@pytest.mark.parametrize("number", SIGNALS)
def test_after_a_signal_to_the_program_no_process_and_no_file_is_left(
    number: signal.Signals, programs: dict[signal.Signals, subprocess.Popen[str]]
) -> None:
    program = programs[number]
    assert program.stdout is not None
    processes = [psutil.Process(pid) for pid in json.loads(program.stdout.readline())]
    files = files_of(processes)
    program.send_signal(number)
    assert program.wait(PATIENCE_S) == -number
    assert_gone(processes, files)
