"""What is timed in a loader's workers, and that the script sees no difference."""

import copy
import gc
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torchdata.stateful_dataloader import StatefulDataLoader

from stretto import EchoDataLoader, StagedDataset
from stretto.profile.members import StageClock, find_members, put_back, swap_in
from stretto.profile.worker import WorkerSpec, time_fetcher
from stretto.profile.worker_logs import WorkerLog, mean_stages, read_worker_logs
from tests.echo.transforms import (
    Add,
    AlbuCompose,
    Compose,
    HorizontalFlip,
    ModuleCompose,
    MonaiCompose,
    Noise,
    RandShift,
    Sometimes,
    Standard,
    Times,
)
from tests.profile.worked import (
    Chooses,
    Deadly,
    Fetching,
    Inspects,
    Noisy,
    Refuses,
    Resumable,
    SlowDisk,
    Stream,
    decode,
    fails,
    global_states,
    jitter,
    plain_iter,
    read_bytes,
    seed_all,
    timed_iter,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # StatefulDataLoader's own

Iterate = Callable[..., Iterator[Any]]


def two_epochs(make: Callable[[], Any], begin: Iterate, directory: Path) -> tuple[list[str], list[str]]:
    """The batches, in full, and the global random states at the end."""
    seed_all()
    loader = make()
    batches = [str(batch) for iteration in (1, 2) for batch in begin(loader, directory, iteration)]
    return batches, global_states()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Noisy, Fetching, Stream])
@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
def test_batches_and_random_states_are_the_same_with_and_without(
    num_workers: int, kind: Any, loader_class: Any, tmp_path: Path
) -> None:
    def make() -> Any:
        return loader_class(kind(), batch_size=5, shuffle=kind is not Stream, num_workers=num_workers)

    assert two_epochs(make, timed_iter, tmp_path) == two_epochs(make, plain_iter, tmp_path)
    logs = read_worker_logs(tmp_path)
    assert {(log.loader, log.iteration) for log in logs} == {(7, 1), (7, 2)}
    assert {log.worker_id for log in logs} == ({0, 1} if num_workers else {-1})
    assert sum(log.num_examples.sum() for log in logs) == 2 * (21 if kind is Stream else 24)


def test_spawned_workers_are_timed_and_give_the_same_batches(tmp_path: Path) -> None:
    def make(context: str) -> Any:
        return DataLoader(
            Noisy(),
            5,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context=context,
            worker_init_fn=passes,
        )

    expected = two_epochs(lambda: make("fork"), plain_iter, tmp_path)
    assert two_epochs(lambda: make("spawn"), timed_iter, tmp_path) == expected
    found = {(log.iteration, log.worker_id): log.num_examples.sum() for log in read_worker_logs(tmp_path)}
    assert found == {(1, 0): 14, (1, 1): 10, (2, 0): 14, (2, 1): 10}


def passes(worker_id: int) -> None:
    """A worker_init_fn that can be pickled."""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Noisy(), Resumable()], ids=["map", "iterable"])
def test_a_stateful_loader_resumes_in_the_middle_as_without(dataset: Any, num_workers: int, tmp_path: Path) -> None:
    def rest(begin: Iterate) -> tuple[str, list[str]]:
        seed_all()
        loader = StatefulDataLoader(copy.deepcopy(dataset), batch_size=3, num_workers=num_workers)
        batches = begin(loader, tmp_path, 1)
        next(batches)
        next(batches)
        state = loader.state_dict()
        del batches, loader
        again = StatefulDataLoader(copy.deepcopy(dataset), batch_size=3, num_workers=num_workers)
        again.load_state_dict(state)
        seed_all()
        return str(state), [str(batch) for batch in begin(again, tmp_path, 2)]

    assert rest(timed_iter) == rest(plain_iter)


@pytest.mark.parametrize("echo_after", [None, "read", "Add"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_echo_in_the_workers_is_the_same_and_its_stages_are_timed(
    echo_after: str | None, num_workers: int, tmp_path: Path
) -> None:
    dataset = Noisy()
    dataset.transform = Compose([Add(1), RandShiftOfTensor(), Times(2)])

    def make() -> Any:
        return EchoDataLoader(
            dataset, 4, shuffle=True, echo_after=echo_after, augment=Add3(), num_workers=num_workers, buffer=16
        )

    assert two_epochs(make, timed_iter, tmp_path) == two_epochs(make, plain_iter, tmp_path)
    (names,) = {log.stage_names for log in read_worker_logs(tmp_path)}
    assert names == ("read", "Add", "RandShiftOfTensor", "Times", "augment", "collate")


class RandShiftOfTensor(RandShift):
    def __call__(self, item: Any) -> Any:
        return item + self.R.normal()


class Add3:
    def __call__(self, example: Any) -> Any:
        return {**example, "image": example["image"] + torch.rand(3)}


def test_a_row_says_what_a_batch_cost_and_holds(tmp_path: Path) -> None:
    for _ in timed_iter(DataLoader(Noisy(24), batch_size=10), tmp_path):
        pass
    gc.collect()
    (log,) = read_worker_logs(tmp_path)
    assert log.stage_names == ("read", "Add", "AddNoise", "Times", "collate")
    assert log.num_examples.tolist() == [10, 10, 4]
    assert log.num_bytes[:2].tolist() == [10 * 20, 10 * 20]
    assert log.item_bytes == (12, 12, 12, 12, 200)
    assert (log.begin[1:] >= log.end[:-1]).all()
    timed = slice(0, 2)  # the first two are timed in any case
    parts = log.stage_wall_s[timed].sum(axis=1)
    assert (parts <= (log.end - log.begin)[timed]).all()
    assert (log.stage_wall_s[timed] > 0).all()
    assert not np.isnan(log.stage_wall_s[:, -1]).any()
    assert [stage.name for stage in mean_stages([log])] == list(log.stage_names)


def test_reading_that_waits_has_little_cpu_time(tmp_path: Path) -> None:
    for _ in timed_iter(DataLoader(SlowDisk(8), batch_size=4, num_workers=2), tmp_path):
        pass
    read, *_ = mean_stages(read_worker_logs(tmp_path))
    assert read.name == "read"
    assert read.wall_s >= 0.02
    assert read.cpu_share < 0.5


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("place", ["transform", "collate", "init"])
def test_errors_and_their_tracebacks_are_the_same(num_workers: int, place: str, tmp_path: Path) -> None:
    dataset = Noisy()
    if place == "transform":
        dataset.transform = Compose([Add(0), Refuses()])

    def error(begin: Iterate) -> str:
        loader = DataLoader(dataset, 4, num_workers=num_workers)
        if place == "collate":
            loader.collate_fn = fails
        if place == "init":
            loader.worker_init_fn = fails
        batches = begin(loader, tmp_path)
        try:
            while True:
                next(batches)
        except StopIteration:
            return "none"
        except Exception as raised:
            found = "".join(traceback.format_exception(raised))
        # The error's traceback is a cycle that holds the iterator: collected with it, a worker would end 5 s later.
        gc.collect()
        return found

    expected = error(plain_iter)
    assert (expected == "none") == (place == "init" and num_workers == 0)
    assert error(timed_iter) == expected


@pytest.mark.parametrize("last", [Times(2), Refuses()])
def test_the_scripts_objects_are_back_after_each_fetch(last: Any, tmp_path: Path) -> None:
    members = [Add(1), last]
    dataset = Noisy()
    dataset.transform = Compose(list(members))
    outer = dataset.transform
    batches = timed_iter(DataLoader(dataset, batch_size=5), tmp_path)
    for _ in range(2):
        try:
            next(batches)
        except ValueError:
            assert type(last) is Refuses
        assert dataset.transform is outer
        assert all(now is member for now, member in zip(outer.transforms, members, strict=True))


def fetch_until_killed(directory: Path) -> None:
    fetcher = _MapDatasetFetcher(Deadly(), True, default_collate, False)
    time_fetcher(fetcher, WorkerSpec(str(directory), 7, 1), 0)
    for start in range(0, 24, 4):
        fetcher.fetch(range(start, start + 4))


def test_rows_of_a_killed_worker_can_be_read(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(target=fetch_until_killed, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    (log,) = read_worker_logs(tmp_path)
    assert (log.pid, log.worker_id, log.num_examples[0]) == (worker.pid, 0, 4)
    assert log.stage_names == ("read", "Add", "AddNoise", "Times", "collate")


def test_persistent_workers_count_their_iterations(tmp_path: Path) -> None:
    loader = DataLoader(Noisy(), batch_size=6, num_workers=2, persistent_workers=True)
    for iteration in (3, 4):
        for _ in timed_iter(loader, tmp_path, iteration):
            pass
    loader._iterator = None
    found = {(log.iteration, log.worker_id): len(log.begin) for log in read_worker_logs(tmp_path)}
    assert found == {(3, 0): 2, (3, 1): 2, (4, 0): 2, (4, 1): 2}


def test_a_transform_chosen_at_run_time_starts_another_file(tmp_path: Path) -> None:
    values = list(timed_iter(DataLoader(Chooses(), batch_size=4), tmp_path))
    gc.collect()
    torch.testing.assert_close(values[1][0], torch.arange(3.0) + 5)
    first, second = read_worker_logs(tmp_path)
    assert (first.stage_names, len(first.begin)) == (("read", "collate"), 1)
    assert (second.stage_names, len(second.begin)) == (("read", "Add", "collate"), 5)
    assert [stage.name for stage in mean_stages([first, second])] == ["read", "Add", "collate"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_inside_the_data_set_is_left_alone(num_workers: int, tmp_path: Path) -> None:
    dataset = Inspects()
    for num_inner, is_same in timed_iter(DataLoader(dataset, batch_size=2, num_workers=num_workers), tmp_path):
        assert num_inner.tolist() == [2, 2]
        assert is_same.all()
    gc.collect()
    (log,) = read_worker_logs(tmp_path)
    assert log.num_examples.tolist() == [2, 2]


def test_stages_of_a_staged_data_set(tmp_path: Path) -> None:
    dataset = StagedDataset(["a", "bc"] * 4, read=read_bytes, decode=decode, jitter=jitter)
    for _ in timed_iter(DataLoader(dataset, batch_size=4), tmp_path):
        pass
    gc.collect()
    (log,) = read_worker_logs(tmp_path)
    assert log.stage_names == ("read", "decode", "jitter", "collate")
    assert log.item_bytes == (1.5, 16, 16, 64)


ADD = Add(1)
TRANSFORMS: list[Any] = [
    Add(1),
    abs,
    Compose([Add(1), Compose([Times(2), nn.Sequential(nn.Identity(), nn.Dropout())]), Add(3), abs]),
    ModuleCompose([nn.Identity(), ADD, ADD]),
    Sometimes([Add(1), Add(2)]),
    AlbuCompose([HorizontalFlip(), AlbuCompose([Noise()])]),
    AlbuCompose([HorizontalFlip()], p=0.5),
    MonaiCompose([RandShift(), Compose([Add(1), Add(2)])]),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_members_have_the_names_that_staged_data_sets_give_them(transform: Any) -> None:
    dataset = Noisy()
    dataset.transform = transform
    subset = Subset(dataset, [1, 2])
    expected = [*StagedDataset.wrap(dataset).stages, "collate"]
    assert list(find_members(dataset).names) == expected
    assert list(find_members(subset).names) == expected
    assert list(find_members(ConcatDataset([subset, Noisy()])).names)[: len(expected) - 1] == expected[:-1]


def test_a_joint_transform_counts_once() -> None:
    dataset: Any = Noisy()
    dataset.transform, dataset.target_transform = Compose([Add(1), Times(2)]), Add(4)
    dataset.transforms = Standard(dataset.transform, dataset.target_transform)
    members = find_members(dataset)
    assert members.names == ("read", "Add", "Times", "target_transform", "collate")
    clock = StageClock()
    clock.begin(len(members.names))
    assert swap_in(members, clock)
    assert dataset.transforms(torch.zeros(1), 1) == (torch.tensor([2.0]), 5)
    put_back()
    assert (clock.num_switches, [seconds > 0 for seconds in clock.wall_s]) == (6, [True] * 4 + [False])


class Many(dict[str, Any]):
    def __call__(self, value: Any) -> Any:
        return self["only"](value)


def test_a_timed_member_looks_like_the_original() -> None:
    dataset = Noisy()
    originals = [Add(1), nn.Dropout(0.5), Many(only=abs)]
    for original in originals:
        dataset.transform = original
        clock = StageClock()
        clock.begin(3)
        assert swap_in(find_members(dataset), clock)
        member = dataset.transform
        assert member is not original
        assert isinstance(member, type(original))
        assert repr(member) == repr(original)
        assert member == original
        assert type(pickle.loads(pickle.dumps(member))) is type(copy.deepcopy(member)) is type(original)
        member.extra = 5
        put_back()
        assert dataset.transform is original
        assert original.extra == 5
    dataset.transform = originals[-1]
    assert swap_in(find_members(dataset), clock)
    assert (len(dataset.transform), dataset.transform["only"], "only" in dataset.transform) == (1, abs, True)
    put_back()


def test_a_second_fetch_at_the_same_time_is_left_untimed() -> None:
    dataset = Noisy()
    clock = StageClock()
    assert swap_in(find_members(dataset), clock)
    assert not swap_in(find_members(Noisy()), clock)
    put_back()
    assert swap_in(find_members(dataset), clock)
    put_back()


def test_a_process_forked_during_a_fetch_has_the_originals() -> None:
    dataset = Noisy()
    receive, send = multiprocessing.Pipe(duplex=False)
    assert swap_in(find_members(dataset), StageClock())
    child = multiprocessing.get_context("fork").Process(target=lambda: send.send(kinds(dataset)))
    child.start()
    child.join()
    assert kinds(dataset) == ["TimedMember"] * 3
    put_back()
    assert receive.recv() == kinds(dataset) == ["Add", "AddNoise", "Times"]


def kinds(dataset: Noisy) -> list[str]:
    return [type(member).__name__ for member in dataset.transform.transforms]


def log(**values: Any) -> WorkerLog:
    return WorkerLog(
        **{
            "loader": 0,
            "iteration": 1,
            "worker_id": 0,
            "pid": 1,
            "stage_names": ("read", "collate"),
            "item_bytes": (4.0, None),
            **dict.fromkeys(("begin", "end", "cpu_s", "core_wait_s", "num_bytes"), np.zeros(2)),
            "num_examples": np.array([2.0, 4.0]),
            "stage_wall_s": np.array([[6.0, 1.0], [np.nan, 3.0]]),
            "stage_cpu_s": np.array([[2.0, 1.0], [np.nan, 0.0]]),
            **values,
        }
    )


def test_means_are_per_example_and_leave_out_what_was_not_timed() -> None:
    read, collate = mean_stages([log(), log(item_bytes=(8.0, None))])
    assert (read.wall_s, read.cpu_s, read.item_bytes) == (3.0, 1.0, 6.0)
    assert (collate.wall_s, collate.cpu_s, collate.item_bytes) == (2.0, 0.5, None)
