"""What an EchoDataLoader does with an example: stages once or for each use, any type, a bounded memory."""

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from stretto import EchoDataLoader, StagedDataset
from tests.echo.sources import Numbers
from tests.echo.transforms import Add, Compose, Times
from tests.echo.workers.counted import Counted, flat

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def as_they_are(examples: list[Any]) -> list[Any]:
    """A collate_fn: the batch is the examples themselves."""
    return examples


def total(batches: list[list[Any]]) -> list[Any]:
    return [example for batch in batches for example in batch]


def double(example: torch.Tensor) -> torch.Tensor:
    return example.mul_(2)


class Held(Dataset[torch.Tensor]):
    """A data set that has its examples in memory and hands them out themselves."""

    def __init__(self, n: int) -> None:
        self.examples = [torch.full((2,), float(index)) for index in range(n)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.examples[index]


@WORKERS
@pytest.mark.parametrize("factor", [1, 1.5, 3])
def test_an_augment_in_place_changes_no_other_use(factor: float, num_workers: int) -> None:
    data = Held(10)
    loader = EchoDataLoader(
        data,
        4,
        True,
        factor=factor,
        augment=double,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        buffer=10,
    )
    for _ in range(2):
        used = Counter(flat(loader))
        assert used.keys() == {2 * index for index in range(10)}
        assert set(used.values()) == {math.floor(factor), math.ceil(factor)}
    assert [int(example[0]) for example in data.examples] == list(range(10))


def test_a_step_in_place_changes_no_other_use() -> None:
    loader = EchoDataLoader(Counted(10), 4, True, factor=3, collate_fn=as_they_are)
    for _ in range(2):
        seen = []
        for batch in loader:
            for example in batch:
                seen.append(int(example[0]))
                example.mul_(-1)
        assert Counter(seen) == dict.fromkeys(range(10), 3)


class Pair(NamedTuple):
    image: Any
    label: int


def as_tensor(index: int) -> Any:
    return torch.full((2, 2), index)


def as_array(index: int) -> Any:
    return np.full((2, 2), index)


def as_picture(index: int) -> Any:
    return Image.new("RGB", (2, 3), (index, 0, 0))


def as_dict(index: int) -> Any:
    return {"image": np.full(2, index), "meta": [str(index), {"size": (index, 2)}]}


def as_pair(index: int) -> Any:
    return Pair(torch.full((2,), index), index)


def spoil(example: Any) -> Any:
    """Change the example in place wherever that can be done; return what it was."""
    match example:
        case torch.Tensor() | np.ndarray():
            was = int(example.reshape(-1)[0])
            example[:] = 99
        case Image.Image():
            was = example.getpixel((0, 0))[0]
            example.putpixel((0, 0), (99, 0, 0))
        case dict():
            was = int(example["image"][0])
            assert example["meta"] == [str(was), {"size": (was, 2)}]
            example["image"][:] = 99
            example["meta"].append(example["meta"][1].clear())
        case Pair(image, label):
            was = int(image[0])
            assert was == label
            image[:] = 99
    return type(example).__name__, was


@WORKERS
@pytest.mark.parametrize("make", [as_tensor, as_array, as_picture, as_dict, as_pair])
def test_examples_of_any_type_are_kept_unchanged(make: Any, num_workers: int) -> None:
    data = StagedDataset(range(9), make=make)
    loader = EchoDataLoader(
        data, 3, factor=3, augment=spoil, num_workers=num_workers, collate_fn=as_they_are, buffer="1MiB"
    )
    name = type(make(0)).__name__
    assert Counter(total(list(loader))) == {(name, index): 3 for index in range(9)}


class Stage:
    """Adds to a number, and counts its calls where all processes see them."""

    def __init__(self, what: int) -> None:
        self.what = what
        self._calls = torch.zeros(2, 64, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, value: int) -> int:
        worker = torch.utils.data.get_worker_info()
        self._calls[worker.id if worker else 0, value % 64] += 1
        return value + self.what

    @property
    def num_calls(self) -> int:
        return int(self._calls.sum())


@WORKERS
@pytest.mark.parametrize("after", ["one", "two", "three", None])
def test_stages_run_once_before_the_echo_point_and_for_each_use_behind(after: str | None, num_workers: int) -> None:
    stages = {"one": Stage(64), "two": Stage(128), "three": Stage(256)}
    augment = Stage(512)
    data = StagedDataset(Numbers(24), **stages)
    loader = EchoDataLoader(
        data, 4, factor=3, echo_after=after, augment=augment, num_workers=num_workers, buffer=12
    )
    used = Counter(total([batch.tolist() for batch in loader]))
    assert used == {index + 64 + 128 + 256 + 512: 3 for index in range(24)}
    num_before = 3 if after is None else 1 + list(stages).index(after)
    expected = [24 if at < num_before else 72 for at in range(3)]
    assert [stage.num_calls for stage in stages.values()] == expected
    assert augment.num_calls == 72
    assert (loader.stats().reads, loader.stats().reread) == (24, 0)


class Images(Counted):
    """A data set with a transform, as torchvision has them."""

    def __init__(self, n: int, transform: Any) -> None:
        super().__init__(n)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index)), index


@WORKERS
@pytest.mark.parametrize(
    ("after", "num_calls"), [("read", (36, 36)), ("Add", (12, 36)), ("Times", (12, 12)), (None, (12, 12))]
)
def test_a_compose_is_cut_after_one_of_its_members(
    after: str | None, num_calls: tuple[int, int], num_workers: int
) -> None:
    data = Images(12, Compose([Add(1), Times(2)]))
    loader = EchoDataLoader(data, 4, True, factor=3, echo_after=after, num_workers=num_workers, buffer=8)
    for _ in range(2):
        batches = [*loader]
        images = torch.cat([image for image, _ in batches])
        labels = torch.cat([label for _, label in batches])
        assert torch.equal(images[:, 0], 2 * (labels + 1.0))
        assert Counter(labels.tolist()) == dict.fromkeys(range(12), 3)
        assert data.reads() == [1] * 12


@WORKERS
def test_a_buffer_in_items_bounds_the_residents(num_workers: int) -> None:
    loader = EchoDataLoader(Counted(60), 4, True, factor=4, buffer=16, num_workers=num_workers)
    most = 0
    for _ in loader:
        most = max(most, loader.stats().resident_items)
    assert 8 <= most <= 16
    assert loader.stats().resident_items == 0


@WORKERS
@pytest.mark.parametrize("buffer", ["40KiB", "100KB"])
def test_a_buffer_in_bytes_bounds_the_residents(buffer: str, num_workers: int) -> None:
    data = StagedDataset(range(80), make=kilobyte)
    loader = EchoDataLoader(data, 4, True, factor=4, buffer=buffer, num_workers=num_workers)
    num_bytes = {"40KiB": 40960, "100KB": 100_000}[buffer]
    most = 0
    for _ in loader:
        stats = loader.stats()
        assert stats.buffer_bytes >= 1024 * stats.resident_items
        most = max(most, stats.buffer_bytes)
    assert num_bytes / 3 < most <= num_bytes
    assert stats.reread == 0


def kilobyte(index: int) -> torch.Tensor:
    return torch.full((256,), float(index))


class Growing(Dataset[torch.Tensor]):
    """Examples behind the 64 that are probed are larger."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        return np.full(1000 if index < 64 else 8000, index, dtype=np.uint8)


def first(example: Any) -> int:
    return int(example[0])


def test_residents_larger_than_the_probed_ones_leave_early_and_are_read_again() -> None:
    loader = EchoDataLoader(Growing(), 4, factor=4, buffer="50KB", augment=first)
    used: Counter[int] = Counter()
    most = 0
    for batch in loader:
        used.update(batch.tolist())
        most = max(most, loader.stats().buffer_bytes)
    assert used == dict.fromkeys(range(120), 4)
    assert most <= 50_000
    stats = loader.stats()
    assert 0 < stats.reread == stats.reads - 120


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (7, "buffer=7 has room for 7 items, with batches of 4 in 2 workers: expected room for a batch in each, 8"),
        ("9KB", "buffer=9000 bytes has room for [0-6] items, with batches of 4 in 2 workers"),
    ],
)
def test_a_buffer_without_room_for_a_batch_in_each_worker_is_refused(buffer: Any, message: str) -> None:
    data = StagedDataset(range(80), make=kilobyte)
    with pytest.raises(ValueError, match=message):
        next(iter(EchoDataLoader(data, 4, factor=2, buffer=buffer, num_workers=2)))


def test_factor_1_keeps_nothing_and_needs_no_buffer() -> None:
    loader = EchoDataLoader(Counted(20), 4, factor=1, buffer=1)
    for _ in loader:
        assert loader.stats().resident_items == 0
    assert loader.stats().buffer_bytes == 0


def test_a_loader_that_goes_back_keeps_no_more_than_a_new_one() -> None:
    loader = EchoDataLoader(StagedDataset(range(80), make=kilobyte), 4, factor=4, buffer="40KB")
    start = loader.state_dict()

    def residents() -> list[tuple[int, int]]:
        kept = []
        for _, _ in zip(range(30), loader, strict=False):
            stats = loader.stats()
            kept.append((stats.resident_items, stats.buffer_bytes))
        return kept

    first_time = residents()
    for _ in range(2):
        loader.load_state_dict(start)
        assert residents() == first_time


def test_the_data_set_is_what_it_was_without_echo() -> None:
    data = StagedDataset(Numbers(10), one=Stage(64), two=Stage(128))
    loader = EchoDataLoader(data, 4, factor=2, echo_after="one", augment=Stage(256))
    assert len(loader.dataset) == 10
    assert loader.dataset[3] == 3 + 64 + 128 + 256
    assert list(loader.dataset.stages) == ["one", "two"]
    with pytest.raises(AttributeError, match="has no attribute 'classes'"):
        _ = loader.dataset.classes


def test_a_view_counts_as_itself_not_as_what_it_is_a_view_of() -> None:
    data = TensorDataset(torch.arange(4000).repeat_interleave(100).view(4000, 100))
    loader = EchoDataLoader(data, batch_size=16, factor=4)
    for _ in loader:
        if loader.stats().updates == 800:
            break
    assert loader.stats().resident_items > 600
    assert loader.stats().buffer_bytes < 2 << 20
