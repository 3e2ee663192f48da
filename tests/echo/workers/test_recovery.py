"""Workers that die, Ctrl-C, start methods, arguments that cannot work: what EchoDataLoader makes of them."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import stretto
from stretto import EchoDataLoader, StagedDataset
from tests.echo.sources import Numbers, id_batches, through_file
from tests.echo.workers.counted import Counted, double_decode, flat, multiset, noisy
from tests.patience import PATIENCE_S

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
PERSISTENT = pytest.mark.parametrize("is_persistent", [False, True])


def killed_in_a_step(batches: Iterator[Any]) -> list[Any]:
    """Take three batches, then kill a worker while the training step runs."""
    taken = [next(batches) for _ in range(3)]

    def step() -> None:
        multiprocessing.active_children()[0].kill()
        threading.Event().wait(PATIENCE_S)  # torch raises where the signal finds us

    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal"):
        step()
    return taken


def killed_before_a_batch(batches: Iterator[Any]) -> list[Any]:
    """Take three batches, then kill a worker; the call that needs its next batch finds out."""
    taken = [next(batches) for _ in range(3)]

    def go_on() -> None:
        worker = multiprocessing.active_children()[0]
        worker.kill()
        worker.join()
        taken.extend(batches)

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        go_on()
    assert multiprocessing.active_children() == []
    assert next(batches, "over") == "over"
    return taken


@PERSISTENT
@pytest.mark.parametrize("kill", [killed_in_a_step, killed_before_a_batch])
def test_after_a_killed_worker_the_run_goes_on_from_its_state(
    kill: Callable[[Iterator[Any]], list[Any]], is_persistent: bool
) -> None:
    def make(num_workers: int) -> EchoDataLoader:
        return EchoDataLoader(
            Counted(40),
            4,
            True,
            factor=2,
            num_workers=num_workers,
            persistent_workers=is_persistent and num_workers > 0,
            buffer=16,
            augment=noisy,
        )

    expected = [multiset(loader) for loader in [make(0)] for _ in range(2)]
    loader = make(2)
    iterator = iter(loader)
    taken = kill(iterator)
    state = through_file(loader.state_dict())
    assert state["num_batches"] == len(taken)
    del iterator
    for again in (loader, make(2)):
        again.load_state_dict(state)
        assert multiset([*taken, *again]) == expected[0]
        assert multiset(again) == expected[1]
        assert again.stats().updates == 40


@pytest.mark.parametrize(("num_workers", "is_persistent"), [(0, False), (2, False), (2, True)])
def test_the_older_of_two_iterators_raises(num_workers: int, is_persistent: bool) -> None:
    loader = EchoDataLoader(
        Counted(24), 4, factor=2, num_workers=num_workers, persistent_workers=is_persistent, buffer=16
    )
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(RuntimeError, match="this iterator is over: its EchoDataLoader has begun another iteration"):
        next(older)
    assert Counter(flat(newer)) == dict.fromkeys(range(24), 2)
    stats = loader.stats()
    assert (stats.epochs, stats.updates, stats.dropped_uses) == (1, 13, 44)


def test_an_iterator_that_is_collected_late_does_not_disturb_the_next() -> None:
    class Forgetting(Numbers):
        older: Any = None

        def __getitem__(self, index: int) -> int:
            self.older = None
            return index

    data = Forgetting(24)
    loader = EchoDataLoader(data, 4, factor=2, buffer=16)
    older = iter(loader)
    next(older)
    data.older, older = older, None
    assert sum(len(batch) for batch in loader) == 48
    assert data.older is None


INTERRUPTED = """
import gc, os, signal, sys, time
import torch, stretto

gc.freeze()
pids = []
for is_persistent in (False, True):  # a process for each, forked because importing torch takes seconds
    pids.append(os.fork())
    if pids[-1] == 0:
        os.dup2(1, 2)
        break
else:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for pid in pids:
        status = os.waitpid(pid, 0)[1]
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        return index

loader = stretto.EchoDataLoader(Data(), 4, factor=2, num_workers=2, persistent_workers=is_persistent, buffer=64)
try:
    for at, batch in enumerate(loader):
        if at == 5:
            print("workers", *[worker.pid for worker in torch.multiprocessing.active_children()], flush=True)
except KeyboardInterrupt:
    os.write(1, b"interrupted at %d\\n" % (loader.state_dict()["num_batches"] - at))
"""


def test_ctrl_c_ends_everything() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        try:
            assert program.stdout is not None
            workers: list[psutil.Process] = []
            while len(workers) < 4:
                line = program.stdout.readline()
                assert line.startswith("workers ")
                workers += [psutil.Process(int(pid)) for pid in line.split()[1:]]
            os.killpg(program.pid, signal.SIGINT)
            rest, _ = program.communicate(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []
    assert rest.splitlines().count("ended 0") == 2
    # 1 in a step; up to 2 if torch had a batch that was still on its way to the step.
    assert len(re.findall("interrupted at [012]\n", rest)) == 2


@pytest.mark.parametrize(("method", "num_workers"), [("spawn", 2), ("forkserver", 1)])
def test_other_start_methods_give_the_same_examples(method: str, num_workers: int) -> None:
    def make(**arguments: Any) -> EchoDataLoader:
        data = StagedDataset(range(16), decode=double_decode, augment=noisy)
        return EchoDataLoader(data, 4, True, factor=2.5, echo_after="decode", buffer=16, **arguments)

    expected = [multiset(loader) for loader in [make()] for _ in range(2)]
    loader = make(num_workers=num_workers, multiprocessing_context=method, persistent_workers=True)
    assert [multiset(loader) for _ in range(2)] == expected
    stats = loader.stats()
    assert (stats.reads, stats.reread, stats.resident_items) == (32, 0, 0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_augment_that_cannot_be_sent_is_named(method: str) -> None:
    loader = EchoDataLoader(
        Numbers(8), 2, factor=2, augment=lambda x: x, num_workers=1, multiprocessing_context=method, buffer=8
    )
    with pytest.raises(ValueError, match=r'stage "augment" .* cannot be sent to worker processes') as refused:
        iter(loader)
    assert "Use a module-level function" in str(refused.value)
    staged = StagedDataset(range(8), read=double_decode, crop=lambda x: x)
    loader = EchoDataLoader(staged, 2, num_workers=1, multiprocessing_context=method, buffer=8)
    with pytest.raises(ValueError, match=r'stage "crop" .* cannot be sent to worker processes'):
        iter(loader)


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "in_order": ({"in_order": False}, ValueError, "in_order=False: expected True"),
    "factor below 1": ({"factor": 0.5}, ValueError, "factor=0.5: expected a finite number >= 1"),
    "factor text": ({"factor": "fast"}, ValueError, "factor='fast': expected a number >= 1 or \"auto\""),
    "factor type": ({"factor": [2]}, TypeError, r"factor=\[2\] is a list"),
    "buffer 0": ({"buffer": 0}, ValueError, "buffer=0: expected a number of items >= 1"),
    "buffer text": ({"buffer": "2 apples"}, ValueError, "buffer='2 apples': expected"),
    "buffer type": ({"buffer": 2.5}, TypeError, "buffer=2.5 is a float"),
    "small buffer": ({"buffer": 7}, ValueError, "buffer=7 has room for 7 items, with batches of 4 in 2 workers"),
    "seed": ({"seed": "x"}, TypeError, "seed='x' is a str"),
    "max_factor": ({"max_factor": 0, "factor": "auto"}, ValueError, "max_factor=0: expected an integer >= 1"),
    "max_factor unused": ({"max_factor": 4}, ValueError, "max_factor=4 has no effect with factor=2.0"),
    "echo_after": ({"echo_after": 3}, TypeError, "echo_after=3: expected the name of a stage"),
    "no stage": ({"echo_after": "crop"}, ValueError, "after='crop': the stages are read"),
    "augment": ({"augment": 3}, TypeError, "augment=3: expected a function of an example"),
    "on_error": ({"on_error": "ignore"}, ValueError, 'on_error=\'ignore\': expected "raise" or "skip"'),
    "max_skipped": ({"max_skipped": -1}, ValueError, "max_skipped=-1: expected an integer >= 0"),
    "set_epoch": ({}, ValueError, "epoch=-1: expected an integer >= 0"),
    "batch_size": ({"batch_size": 0}, ValueError, "batch_size"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments_that_cannot_work_are_refused_with_their_value(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        EchoDataLoader(Numbers(20), **({"batch_size": 4, "num_workers": 2} | arguments)).set_epoch(-1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_echo_plan_finds_the_plan_or_says_that_there_is_none() -> None:
    loader = EchoDataLoader(Numbers(8), 2)
    assert stretto.echo_plan(loader) is loader.batch_sampler
    assert stretto.echo_plan(loader).state_dict() == loader.state_dict()
    rebuilt = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    assert stretto.echo_plan(rebuilt) is loader.batch_sampler
    single = EchoDataLoader(Numbers(8), batch_size=None)
    assert stretto.echo_plan(single) is single.sampler
    for wrong in (DataLoader(Numbers(8), 2), EchoDataLoader(Stream(), 2), id_batches(2, 2)):
        with pytest.raises(ValueError, match=f"there is no EchoPlan in this {type(wrong).__name__}: expected an"):
            stretto.echo_plan(wrong)


def test_workers_tell_who_they_are() -> None:
    """The data set's own `get_worker_info` and `worker_init_fn` work as in a DataLoader."""
    data = StagedDataset(range(8), number=worker_number)
    loader = EchoDataLoader(data, 2, factor=2, num_workers=2, worker_init_fn=note_worker, buffer=8)
    assert set(torch.cat([*loader]).tolist()) == {100, 101}


_noted: list[int] = []


def note_worker(worker_id: int) -> None:
    _noted.append(100 + worker_id)


def worker_number(index: int) -> int:
    worker = get_worker_info()
    assert worker is not None
    assert _noted == [100 + worker.id]
    return _noted[0]
