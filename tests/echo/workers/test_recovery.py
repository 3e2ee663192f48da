"""Workers that die, examples that raise, Ctrl-C, arguments that cannot work: what EchoDataLoader makes of them."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import stretto
from stretto import EchoDataLoader, StagedDataset
from tests.echo.sources import PATIENCE_S, Numbers, id_batches, through_file
from tests.echo.workers.counted import Counted, flat, multiset, noisy

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


class TwoArgumentsError(Exception):
    """One that cannot be made from its message."""

    def __init__(self, what: str, index: int) -> None:
        super().__init__(f"{what} at {index}")


class Bad(Counted):
    """Some indices raise."""

    def __init__(self, n: int, *bad: int) -> None:
        super().__init__(n)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        example = super().__getitem__(index)
        if index in self.bad:
            raise KeyError(f"number {index}")
        return example


class BadTogether(Bad):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def decode(index: int) -> torch.Tensor:
    if index == 7:
        raise TwoArgumentsError("torn picture", index)
    return torch.full((3,), float(index))


@pytest.mark.parametrize("error", [None, "augment"])
def test_an_error_says_index_and_stage(error: str | None) -> None:
    if error is None:
        loader = EchoDataLoader(StagedDataset(range(20), decode=decode), 4, factor=2)
        expected = 'In stage "decode", index 7'
    else:
        loader = EchoDataLoader(range(20), 4, factor=2, augment=decode)
        expected = 'In stage "augment", index 7'
    with pytest.raises(TwoArgumentsError, match="torn picture at 7") as raised:
        for _ in loader:
            pass
    assert expected in raised.value.__notes__
    with pytest.raises(KeyError) as from_source:
        list(EchoDataLoader(Bad(20, 7), 4, factor=2))
    assert from_source.value.__notes__ == ["In the data set, index 7"]


@PERSISTENT
def test_an_error_in_a_worker_says_index_and_stage_and_the_run_can_go_on(is_persistent: bool) -> None:
    arguments = {"num_workers": 2, "persistent_workers": is_persistent, "buffer": 12, "seed": 3}
    loader = EchoDataLoader(StagedDataset(range(20), decode=decode), 4, factor=2, **arguments)
    taken = []
    with pytest.raises(Exception, match="torn picture at 7") as raised:
        taken.extend(loader)
    assert 'In stage "decode", index 7' in str(raised.value)
    assert "TwoArgumentsError" in str(raised.value)
    assert multiprocessing.active_children() == []
    mended = EchoDataLoader(StagedDataset(range(20), decode=double_decode), 4, factor=2, **arguments)
    mended.load_state_dict(loader.state_dict())
    assert Counter(flat([*taken, *mended])) == dict.fromkeys(range(20), 2)
    del mended  # what was raised keeps this frame


def double_decode(index: int) -> torch.Tensor:
    return torch.full((3,), float(index))


@pytest.mark.parametrize("data", [Bad(20, 3, 8), BadTogether(20, 3, 8)])
def test_skipped_examples_are_left_out_and_counted_and_told_of_once(data: Bad) -> None:
    loader = EchoDataLoader(data, 4, True, factor=3, on_error="skip")
    with warnings.catch_warnings(record=True, action="always") as told:
        epochs = [flat(loader), flat(loader)]
    for used in epochs:
        assert Counter(used) == dict.fromkeys({*range(20)} - {3, 8}, 3)
    assert len(told) == 1
    assert re.match(r"index (3|8) raised KeyError\('number \1'\) and is left out", str(told[0].message))
    assert loader.stats().skipped == 4  # two in each epoch, however many uses they had


def torn(example: torch.Tensor) -> torch.Tensor:
    if int(example[0]) == 7:
        raise TwoArgumentsError("torn picture", 7)
    return example


def test_an_example_whose_augment_raises_is_skipped() -> None:
    loader = EchoDataLoader(Counted(20), 4, factor=3, augment=torn, on_error="skip")
    with pytest.warns(
        UserWarning, match=r"index 7 raised TwoArgumentsError\('torn picture at 7'\) and is left out"
    ):
        assert Counter(flat(loader)) == dict.fromkeys({*range(20)} - {7}, 3)
    assert loader.stats().skipped == 1


class Told:
    """Counts the warnings in each worker, in memory that all share: a worker_init_fn."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, worker_id: int) -> None:
        def count(*warning: Any) -> None:
            self.counts[worker_id] += 1

        warnings.simplefilter("always")
        warnings.showwarning = count


def test_skipped_examples_are_counted_in_workers_which_tell_of_the_first() -> None:
    data, told = Bad(20, 3, 8, 11), Told()
    loader = EchoDataLoader(data, 5, True, factor=2, on_error="skip", num_workers=2, worker_init_fn=told, buffer=16)
    for epoch in range(1, 3):
        assert Counter(flat(loader)) == dict.fromkeys({*range(20)} - {3, 8, 11}, 2)
        assert loader.stats().skipped == 3 * epoch
    assert data.reads() == [2] * 20
    assert told.counts.max() == 1


@WORKERS
@pytest.mark.filterwarnings("ignore:index .* is left out")
def test_more_than_max_skipped_end_the_run(num_workers: int) -> None:
    loader = EchoDataLoader(
        Bad(40, *range(0, 40, 5)), 4, factor=2, on_error="skip", max_skipped=4, num_workers=num_workers, buffer=16
    )
    with pytest.raises(RuntimeError, match=r"more than max_skipped=4 examples raised; the last one was index \d+"):
        list(loader)
    assert loader.stats().skipped >= 5
    with pytest.raises(RuntimeError, match="more than max_skipped=0 examples raised; the last one was index 0"):
        list(EchoDataLoader(Bad(8, 0), 4, factor=2, on_error="skip", max_skipped=0))


@WORKERS
@pytest.mark.filterwarnings("ignore:index .* is left out")
def test_the_last_good_example_stands_in_where_a_whole_batch_raised(num_workers: int) -> None:
    loader = EchoDataLoader(Bad(17, 16), 4, factor=1, on_error="skip", num_workers=num_workers)
    batches = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 1]
    assert batches[4][0] in batches[2 if num_workers else 3]
    assert (loader.stats().skipped, loader.stats().reread) == (1, 1)


@WORKERS
@pytest.mark.filterwarnings("ignore:index .* is left out")
def test_a_batch_of_bad_examples_only_is_an_error(num_workers: int) -> None:
    loader = EchoDataLoader(Bad(8, *range(8)), 4, factor=2, on_error="skip", num_workers=num_workers, buffer=8)
    with pytest.raises(ValueError, match="nothing can stand in"):
        list(loader)


@pytest.mark.filterwarnings("ignore:index .* is left out")
def test_probing_skips_what_the_run_skips() -> None:
    loader = EchoDataLoader(Bad(20, 0, 1), 4, factor=2, on_error="skip", buffer="1MiB")
    assert Counter(flat(loader)) == dict.fromkeys(range(2, 20), 2)
    assert loader.stats().skipped == 2


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
            rest, _ = program.communicate(timeout=60)
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
