"""EchoDataLoader over iterable data sets: each worker echoes its own stream."""

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch.utils.data import IterableDataset

from stretto import EchoDataLoader, echo_plan
from tests.echo.sources import through_file
from tests.echo.workers.scripts.common import Sized, Stream, add_noise

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class Epochs(IterableDataset[torch.Tensor]):
    """Rows that tell the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.full((16, 2), self.epoch))


class Once(IterableDataset[torch.Tensor]):
    """What a socket is: the second iteration has nothing."""

    def __init__(self) -> None:
        self.rows = iter(torch.arange(200).view(100, 2))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.rows


class OddRaises:
    def __init__(self, is_odd: int = 1) -> None:
        self.is_odd = is_odd

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        if row[0] % 2 == self.is_odd:
            raise ArithmeticError(f"odd {int(row[0])}")
        return row


def echoed(dataset: Any = None, num_workers: int = 0, **arguments: Any) -> EchoDataLoader:
    defaults: dict[str, Any] = {"batch_size": 8, "factor": 3, "augment": add_noise, "seed": 5}
    return EchoDataLoader(dataset or Stream(100), num_workers=num_workers, **{**defaults, **arguments})


def batches_of(loader: EchoDataLoader) -> list[Any]:
    return [batch.tolist() for batch in loader]


def rows_of(loader: EchoDataLoader) -> list[Any]:
    return [row for batch in batches_of(loader) for row in batch]


@WORKERS
def test_each_example_is_read_once_and_used_its_number_of_times_augmented_anew(num_workers: int) -> None:
    loader = echoed(num_workers=num_workers)
    rows = rows_of(loader)
    assert Counter(index for index, _ in rows) == dict.fromkeys(range(100), 3)
    assert len({tuple(row) for row in rows}) == 300
    stats = loader.stats()
    assert (stats.reads, stats.uses, stats.epochs, stats.fresh_items, stats.factor) == (100, 300, 1, 100, 3)


@WORKERS
def test_fractional_factor_uses_each_example_two_or_three_times(num_workers: int) -> None:
    counts = Counter(index for index, _ in rows_of(echoed(Stream(400), num_workers, factor=2.5)))
    assert set(counts.values()) == {2, 3}
    assert len(counts) == 400
    assert 950 < counts.total() < 1050


def test_factor_one_keeps_every_example_once() -> None:
    assert sorted(index for index, _ in rows_of(echoed(factor=1))) == list(range(100))


def test_the_order_is_shuffled_within_the_buffer_and_differs_by_seed_and_epoch() -> None:
    loader = echoed(factor=2)
    orders = [rows_of(loader), rows_of(loader), rows_of(echoed(factor=2, seed=6))]
    indices = [[index for index, _ in rows] for rows in orders]
    assert indices[0] != indices[1] != indices[2] != indices[0]
    assert indices[0][:20] != list(range(20))
    assert rows_of(echoed(factor=2)) == orders[0]


def test_a_batch_has_an_example_twice_only_at_the_end() -> None:
    batches = batches_of(echoed(factor=3, buffer=24))
    for batch in batches[:-3]:
        assert len({index for index, _ in batch}) == 8


@WORKERS
def test_drop_last_leaves_full_batches_only(num_workers: int) -> None:
    assert {len(batch) for batch in batches_of(echoed(num_workers=num_workers, drop_last=True))} == {8}


@pytest.fixture(scope="module")
def datasets() -> Any:
    """Imported where it is used: every test process collects this file."""
    return importlib.import_module("datasets")


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_hugging_face_stream_is_read_once_and_used_its_number_of_times(datasets: Any, num_workers: int) -> None:
    table = datasets.Dataset.from_dict({"x": list(range(40))})
    loader = EchoDataLoader(
        table.to_iterable_dataset(num_shards=2), 8, num_workers=num_workers, factor=3, augment=with_noise
    )
    batches = list(loader)
    assert Counter(torch.cat([batch["x"] for batch in batches]).tolist()) == dict.fromkeys(range(40), 3)
    assert len(set(torch.cat([batch["noise"] for batch in batches]).tolist())) == 120
    assert loader.stats().reads == 40


def with_noise(example: dict[str, Any]) -> dict[str, Any]:
    example["noise"] = int(torch.randint(1 << 40, ()))
    return example


def test_hugging_face_stream_is_shuffled_anew_in_each_epoch(datasets: Any) -> None:
    table = datasets.Dataset.from_dict({"x": list(range(64))})
    stream = table.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=64)
    loader = EchoDataLoader(stream, 8, factor=1)
    orders = [torch.cat([batch["x"] for batch in loader]).tolist() for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = EchoDataLoader(stream, 8, factor=1)
    again.set_epoch(1)
    assert torch.cat([batch["x"] for batch in again]).tolist() == orders[1]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Two shards of 20 examples."""
    for shard in range(2):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for at in range(20):
                writer.write({"__key__": f"{shard}{at:03d}", "x.cls": 20 * shard + at})
    return str(tmp_path / "{0..1}.tar")


@WORKERS
@pytest.mark.filterwarnings("ignore:unclosed file")  # WebDataset leaves its last file open
def test_web_dataset_of_examples(shards: str, num_workers: int) -> None:
    source = webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("x.cls")
    loader = EchoDataLoader(source, batch_size=8, num_workers=num_workers, factor=3)
    counts = Counter(torch.cat([batch[0] for batch in loader]).tolist())
    assert counts == dict.fromkeys(range(40), 3)
    assert loader.stats().reads == 40


@WORKERS
@pytest.mark.filterwarnings("ignore:unclosed file")  # WebDataset leaves its last file open
def test_web_dataset_of_batches_is_echoed_by_batches(shards: str, num_workers: int) -> None:
    source = webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("x.cls").batched(5)
    loader = EchoDataLoader(source, batch_size=None, num_workers=num_workers, factor=3)
    counts = Counter(tuple(batch[0].tolist()) for batch in loader)
    assert counts == {tuple(range(at, at + 5)): 3 for at in range(0, 40, 5)}
    assert loader.stats().reads == 8


@WORKERS
def test_auto_ends_with_a_factor_within_its_bounds(num_workers: int) -> None:
    loader = echoed(Stream(600), num_workers, factor="auto", max_factor=4)
    for _ in range(2):
        counts = Counter(index for index, _ in rows_of(loader))
        assert len(counts) == 600
        assert set(counts.values()) <= {1, 2, 3, 4}
    assert 1 <= loader.stats().factor <= 4


def test_auto_has_a_state_between_epochs_only() -> None:
    loader = echoed(factor="auto")
    assert not loader.state_dict()["is_in_epoch"]
    updates = iter(loader)
    next(updates)
    with pytest.raises(ValueError, match='"auto" over an iterable data set has no state within an epoch'):
        loader.state_dict()
    assert list(updates)
    again = echoed(factor="auto")
    again.load_state_dict(through_file(loader.state_dict()))
    assert again.state_dict() == loader.state_dict()
    assert again.state_dict()["epoch"] == 1


@WORKERS
def test_resume_at_every_step_equals_uninterrupted_run(num_workers: int) -> None:
    source, settings = Stream(30), {"factor": 2.5, "buffer": 16}
    loader = echoed(source, num_workers, **settings)
    states, batches = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch.tolist())
            states.append(through_file(loader.state_dict()))
        states[-1] = through_file(loader.state_dict())  # the epoch's end, as the loop sees it
    step = 1 if num_workers == 0 else 6
    for at in range(0, len(states), step):
        again = echoed(source, num_workers, **settings)
        again.load_state_dict(states[at])
        rest = batches_of(again)
        while len(rest) < len(batches) - at:
            rest += batches_of(again)
        assert rest[: len(batches) - at] == batches[at:]


def test_resume_of_a_resume() -> None:
    loader = echoed()
    batches = batches_of(loader)
    state = echoed().state_dict()
    for start in (0, 5, 11):
        again = echoed()
        again.load_state_dict(state)
        assert again.state_dict() == state
        updates = iter(again)
        for at in range(start, start + 5 + (start == 5)):
            assert next(updates).tolist() == batches[at]
        state = through_file(again.state_dict())
    assert state["num_batches"] == 16


def test_a_loader_that_has_begun_takes_another_state() -> None:
    loader = echoed()
    updates = iter(loader)
    for _ in range(3):
        next(updates)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in updates]
    batches_of(loader)
    loader.load_state_dict(state)
    assert batches_of(loader) == rest


@pytest.mark.parametrize(
    ("changed", "saved", "now"),
    [
        ({"num_workers": 2}, "num_workers=0", "num_workers=2"),
        ({"batch_size": 4}, "batch_size=8", "batch_size=4"),
        ({"factor": 2}, "factor=3", "factor=2"),
        ({"seed": 6}, "seed=5", "seed=6"),
        ({"buffer": 80}, "buffer=None", "buffer=80"),
        ({"dataset": Sized(100)}, "data set='Stream'", "data set='Sized'"),
    ],
)
def test_state_of_other_settings_is_refused_with_both_values(changed: dict[str, Any], saved: str, now: str) -> None:
    with pytest.raises(ValueError, match=rf"{saved}.*{now}"):
        echoed(**changed).load_state_dict(echoed().state_dict())


def test_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not saved by EchoDataLoader\.state_dict"):
        echoed().load_state_dict({"epoch": 1})


def test_a_stream_that_cannot_be_replayed_is_found_out() -> None:
    loader = echoed(Once())
    updates = iter(loader)
    next(updates)
    state = loader.state_dict()
    list(updates)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="ended after 0 batches, but the state was saved after 1"):
        iter(loader)


@WORKERS
def test_augmentation_and_draws_differ_between_epochs(num_workers: int) -> None:
    loader = echoed(num_workers=num_workers, persistent_workers=num_workers > 0)
    first, second = rows_of(loader), rows_of(loader)
    assert {noise for _, noise in first}.isdisjoint(noise for _, noise in second)
    assert loader.stats().reads == 200


def test_workers_augment_differently() -> None:
    rows = rows_of(echoed(num_workers=2))
    assert len({noise for _, noise in rows}) == 300


@WORKERS
def test_set_epoch_reaches_the_data_set(num_workers: int) -> None:
    loader = echoed(Epochs(), num_workers, augment=None, factor=2)
    assert [set(map(tuple, rows_of(loader))) for _ in range(2)] == [{(0, 0)}, {(1, 1)}]
    again = echoed(Epochs(), num_workers, augment=None, factor=2)
    again.set_epoch(7)
    assert [set(map(tuple, rows_of(again))) for _ in range(2)] == [{(7, 7)}, {(8, 8)}]


def test_length_follows_from_that_of_the_data_set() -> None:
    loader = echoed(Sized(100))
    assert len(loader) == len(list(loader)) == 38
    assert len(echoed(Sized(100), drop_last=True)) == 37
    with pytest.raises(TypeError, match="no len"):
        len(echoed())
    with pytest.raises(TypeError, match='factor="auto" has no length'):
        len(echoed(Sized(100), factor="auto"))


@pytest.mark.parametrize("buffer", [16, "24KiB"])
def test_buffer_bounds_how_far_the_uses_of_an_example_spread(buffer: int | str) -> None:
    rows = rows_of(echoed(Stream(200), buffer=buffer))
    first = {index: at for at, (index, _) in reversed([*enumerate(rows)])}
    newest = 0
    most = 0
    for at, (index, _) in enumerate(rows):
        newest = max(newest, index)
        left = sum(1 for other in range(newest + 1) if other not in first or first[other] > at)
        assert left <= 40
        most = max(most, newest - index)
    assert Counter(index for index, _ in rows) == dict.fromkeys(range(200), 3)
    wide = [index for index, _ in rows_of(echoed(Stream(200), buffer=160))]
    assert len(set(wide[:160])) > len({index for index, _ in rows[:160]})


@pytest.mark.parametrize("buffer", [16, "24KiB"])
def test_what_was_read_and_not_used_to_the_end_is_resident(buffer: int | str) -> None:
    loader = echoed(buffer=buffer)
    used: Counter[int] = Counter()
    for batch in loader:
        used.update(batch[:, 0].int().tolist())
        stats = loader.stats()
        assert stats.resident_items == stats.reads - sum(num_uses == 3 for num_uses in used.values())
    assert loader.stats().resident_items == 0


def test_a_buffer_without_room_for_a_batch_in_each_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer=15 has room for 15 items, with batches of 8 in 2 workers"):
        echoed(num_workers=2, buffer=15)
    with pytest.raises(ValueError, match="buffer=1024 bytes has room for 1 items, with batches of 8"):
        list(echoed(buffer="1KiB"))


def test_stages_of_an_iterable_data_set_are_refused() -> None:
    with pytest.raises(ValueError, match="echo_after='decode': an iterable data set has no stages"):
        echoed(echo_after="decode")


def test_there_is_no_plan_to_find() -> None:
    with pytest.raises(ValueError, match="there is no EchoPlan in this EchoDataLoader"):
        echo_plan(echoed())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:index")
def test_examples_whose_augmentation_raises_are_left_out_and_counted(num_workers: int) -> None:
    loader = echoed(Stream(40), num_workers, augment=OddRaises(), on_error="skip")
    assert Counter(index for index, _ in rows_of(loader)) == dict.fromkeys(range(0, 40, 2), 3)
    assert loader.stats().skipped == 20


def test_more_than_max_skipped_raises_the_last_error() -> None:
    with pytest.warns(UserWarning, match="is left out"), pytest.raises(RuntimeError, match="max_skipped=2") as info:
        list(echoed(augment=OddRaises(), on_error="skip", max_skipped=2))
    assert isinstance(info.value.__cause__, ArithmeticError)


@WORKERS
def test_what_augment_raises_ends_the_epoch_with_that_error(num_workers: int) -> None:
    with pytest.raises(ArithmeticError, match="odd"):
        list(echoed(num_workers=num_workers, augment=OddRaises()))
