"""Several processes that make a study's runs, and the one that watches them."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

import torch

from stretto.study.conditions import Condition
from stretto.study.records import Task
from stretto.study.search import Progress, Search, Watcher
from stretto.study.study import Study, load_study

_POLL_S = 1.0
_END_S = 20.0  # a process that is told to end has so long for what it has in hand


@dataclass(frozen=True, slots=True)
class Job:
    """What each process needs to know to make the same study."""

    file: Path
    conditions: tuple[Condition, ...]
    storage: Path
    trials: int
    seeds: int
    to_budget: bool
    runs: Path | None

    def search(self, study: Study) -> Search:
        """The runs of the file's study. Raises what `Search` raises."""
        return Search(
            study,
            self.conditions,
            self.storage,
            trials=self.trials,
            seeds=self.seeds,
            to_budget=self.to_budget,
            runs=self.runs,
        )


def work_together(job: Job, search: Search, num_processes: int, on_progress: Callable[[Progress], None]) -> None:
    """Make the runs of `search`, which is `job`'s, by so many processes; tell of the progress about once a second.

    Raises RuntimeError if a process fails, with what it said.
    """
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[SpawnProcess, Connection]] = []
    try:
        for _ in range(num_processes):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(job, theirs), daemon=False)
            process.start()
            theirs.close()
            workers.append((process, ours))
        while any(process.is_alive() for process, _ in workers):
            on_progress(search.progress())
            for process, connection in workers:
                if (said := _said(connection)) is not None:
                    raise RuntimeError(said)
                process.join(_POLL_S / num_processes)
        on_progress(search.progress())
    finally:
        _end([process for process, _ in workers])
    for process, connection in workers:
        if (said := _said(connection)) is not None:
            raise RuntimeError(said)
        if process.exitcode and not all(outcome.is_done for outcome in search.outcomes()):
            raise RuntimeError(
                f"a process ended with exit code {process.exitcode}, which a negative number is the signal of (-9: "
                "killed, often for its memory), and the others could not finish: try fewer --processes"
            )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that numbers do not depend on how many processes share the cores.

    A study's file may set another number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def ends_on_terminate() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


class Orphan(Exception):  # noqa: N818
    """The process that started this one is gone."""


class WithParent(Watcher):
    """Begins no run once the parent has been killed."""

    def begins(self, task: Task) -> None:  # noqa: ARG002
        """Raise Orphan if the process that started this one is gone."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise Orphan


def _work(job: Job, to_parent: Connection) -> None:
    """The body of a process. The terminal's Ctrl-C is left to the parent, which tells all to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with one_thread(), job.search(load_study(job.file)) as search:
            search.work(WithParent())
    except (KeyboardInterrupt, Orphan):
        sys.exit(0)
    except (ValueError, RuntimeError, OSError) as error:
        to_parent.send(str(error))
    except BaseException:
        to_parent.send(traceback.format_exc())


def _said(connection: Connection) -> str | None:
    """What a process that failed sent."""
    try:
        return str(connection.recv()) if connection.poll() else None
    except EOFError:
        return None


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _END_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
