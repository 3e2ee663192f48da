"""Nothing of an EchoLoader outlives its use: no thread, no worker process, no memory."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stretto
from tests.echo.sources import Gated, Numbers, await_arrivals, epoch, id_batches, upstream_threads
from tests.patience import PATIENCE_S

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def make(num_workers: int = 0, **settings: Any) -> stretto.EchoLoader:
    return stretto.echo(DataLoader(Numbers(400), 4, num_workers=num_workers, shuffle=True), 2, **settings)


def assert_nothing_is_left() -> None:
    for thread in upstream_threads():
        thread.join(PATIENCE_S)
    assert upstream_threads() == []
    for worker in multiprocessing.active_children():
        worker.join(PATIENCE_S)
    assert multiprocessing.active_children() == []


@WORKERS
def test_an_early_break_leaves_no_thread(num_workers: int) -> None:
    loader = make(num_workers)
    for _ in loader:
        break
    for thread in upstream_threads():
        thread.join(PATIENCE_S)
    assert upstream_threads() == []
    loader.close()
    assert_nothing_is_left()


def test_an_early_break_while_the_source_is_stuck_does_not_wait_for_it() -> None:
    source = Gated(id_batches(6, 2))
    with stretto.echo(source, 2) as loader, source:
        source.release()
        for _ in loader:
            break
        assert len(upstream_threads()) == 1  # it is in the middle of a fetch
        source.release()
        for thread in upstream_threads():
            thread.join(PATIENCE_S)
        assert upstream_threads() == []
        source.release(20)
        assert len(epoch(loader)) == 12


def test_breaking_again_and_again_loses_no_batch() -> None:
    with stretto.echo(id_batches(20, 2), 1, buffer=2) as loader:
        seen = []
        for _ in range(20):
            for batch in loader:
                seen += batch.tolist()
                break
    assert sorted(seen) == list(range(40))


@WORKERS
def test_the_older_of_two_iterators_raises(num_workers: int) -> None:
    with make(num_workers) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        with pytest.raises(RuntimeError, match="this iterator is over: its EchoLoader has begun another iteration"):
            next(older)
        del older
        assert len([*newer]) == len(loader) == 200


def test_an_iterator_raises_after_close() -> None:
    loader = make()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(RuntimeError, match="this iterator is over: its EchoLoader is closed"):
        next(iterator)
    with pytest.raises(ValueError, match="this EchoLoader is closed"):
        iter(loader)


def test_an_iterator_that_is_over_stays_over() -> None:
    with stretto.echo(id_batches(3, 2), 2) as loader:
        iterator = iter(loader)
        assert len([*iterator]) == 6
        assert next(iterator, None) is None
        assert loader.stats().epochs == 1


@WORKERS
def test_a_forgotten_loader_ends_its_thread_and_workers(num_workers: int) -> None:
    loader = make(num_workers)
    iterator = iter(loader)
    next(iterator)
    reference = weakref.ref(loader)
    del loader, iterator
    gc.collect()
    assert reference() is None
    assert_nothing_is_left()


def test_closing_in_the_middle_of_a_fetch_waits_for_it_and_ends_its_thread() -> None:
    source = Gated(id_batches(6, 2))
    loader = stretto.echo(source, 2)
    source.release()
    next(iter(loader))
    closing = threading.Thread(target=loader.close)
    closing.start()
    source.release()
    closing.join(PATIENCE_S)
    assert_nothing_is_left()
    with pytest.raises(ValueError, match="this EchoLoader is closed"):
        iter(loader)


class Watched(threading.Condition):
    """Tells that somebody waits on it, before it lets go of its lock."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_closing_ends_another_thread_that_waits_for_a_batch() -> None:
    source = Gated(id_batches(6, 2))
    loader = stretto.echo(source, 2)
    loader._stream.upstream._changed = watched = Watched()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            next(iter(loader))
        except RuntimeError as error:
            raised.append(error)
        source.release()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert watched.is_waited_for.wait(PATIENCE_S)
    loader.close()
    waiting.join(PATIENCE_S)
    assert str(*raised) == "this iterator is over: its EchoLoader is closed"
    assert_nothing_is_left()


def test_a_process_forked_while_the_thread_held_its_lock_can_end() -> None:
    with stretto.echo(id_batches(6, 2), 2) as loader:
        next(iter(loader))
        is_held, is_forked = threading.Event(), threading.Event()

        def hold() -> None:
            with loader._stream.upstream._changed:
                is_held.set()
                is_forked.wait(PATIENCE_S)

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait(PATIENCE_S)
        if (child := os.fork()) == 0:
            signal.alarm(PATIENCE_S)  # ends a process that waits for ever
            loader.close()
            os._exit(0)
        is_forked.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0


@WORKERS
def test_close_and_with_end_everything_and_close_works_twice(num_workers: int) -> None:
    with make(num_workers) as loader:
        next(iter(loader))
        loader.close()
        loader.close()
        assert_nothing_is_left()
    assert loader.stats().updates == 1
    assert len(loader) == 200


def test_a_loader_that_was_never_used_closes() -> None:
    loader = make()
    loader.close()
    assert loader.stats().dropped_uses == 0


def test_closing_gives_samplers_their_missing_generator_back() -> None:
    source = DataLoader(Numbers(8), 2, shuffle=True)
    with stretto.echo(source, 2) as loader:
        epoch(loader)
        assert source.sampler.generator is not None
    assert source.sampler.generator is None
    assert source.generator is None


def test_closing_frees_the_batches() -> None:
    batch = torch.zeros(4)
    loader = stretto.echo([batch, torch.zeros(4)], 9, unit="batch", copy=False)
    next(iter(loader))
    loader.close()
    assert loader.stats().buffer_bytes == 0


EXITS = [  # workers: how the program ends
    "0: next(iterator)",
    "2: next(iterator)",
    "2: next(iterator); del iterator",
    "0: list(iterator)",
    "2: list(iterator)",
    "2: next(iterator); raise SystemExit(7)",
    "2: pass",
    "2: next(iterator); loader.close()",
]
PROGRAM = """
import gc, os, sys
import torch, stretto
from torch.utils.data import DataLoader, TensorDataset

gc.freeze()  # so that a process ends in half a second instead of one and a half
pids = {}
for ending in sys.argv[1:]:  # a process for each, forked because importing torch takes seconds
    pids[ending] = os.fork()
    if pids[ending] == 0:
        os.dup2(1, 2)
        break
else:
    for ending, pid in pids.items():
        print(os.WEXITSTATUS(os.waitpid(pid, 0)[1]), ending, flush=True)
    sys.exit()
data = TensorDataset(torch.arange(40))
num_workers, ending = ending.split(": ")
loader = stretto.echo(DataLoader(data, 4, shuffle=True, num_workers=int(num_workers)), 2)
iterator = iter(loader)
exec(ending)
"""


def test_the_interpreter_exits_promptly_and_silently() -> None:
    command = [sys.executable, "-c", PROGRAM, *EXITS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    expected = [f"{7 if 'SystemExit' in ending else 0} {ending}" for ending in EXITS]
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")


def test_the_next_batch_is_fetched_while_the_step_runs() -> None:
    source = Gated(id_batches(6, 2))
    with stretto.echo(source, 1, buffer=2) as loader, source:
        source.release(3)
        iterator = iter(loader)
        next(iterator)
        await_arrivals(loader, 2)
