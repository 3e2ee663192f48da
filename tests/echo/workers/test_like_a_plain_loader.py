"""What works with a plain DataLoader works here: data sets that workers set up, odd samplers and batches."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from stretto import EchoDataLoader
from tests.echo.sources import Numbers

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class Range(IterableDataset[int]):
    """As in torch's documentation: workers cut it into parts by setting its attributes."""

    def __init__(self) -> None:
        self.start, self.end = 0, 40

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def take_a_part(worker_id: int) -> None:
    info = get_worker_info()
    size = len(range(info.dataset.start, info.dataset.end)) // info.num_workers
    info.dataset.start += worker_id * size
    info.dataset.end = info.dataset.start + size


def test_a_worker_init_fn_shards_an_iterable_data_set() -> None:
    loader = EchoDataLoader(Range(), batch_size=5, num_workers=2, worker_init_fn=take_a_part, factor=2)
    used = torch.cat(list(loader))
    assert used.bincount().tolist() == [2] * 40


def identity(example: torch.Tensor) -> torch.Tensor:
    return example


class File(Dataset[torch.Tensor]):
    """Is opened in the worker."""

    handle: int | None = None
    epoch = -1

    def __init__(self) -> None:
        self.transform = identity

    def open(self) -> None:
        self.handle = 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.handle is None:
            raise OSError("not opened")
        return self.transform(torch.tensor([index, self.epoch]))


def call_open(worker_id: int) -> None:
    get_worker_info().dataset.open()


def set_handle(worker_id: int) -> None:
    get_worker_info().dataset.handle = worker_id


@pytest.mark.parametrize("echo_after", [None, "read"])
@pytest.mark.parametrize("worker_init_fn", [call_open, set_handle])
def test_a_worker_init_fn_opens_the_data_set(worker_init_fn: Any, echo_after: str | None) -> None:
    """Also that of the examples which are read once more for their sizes, and of a data set taken apart."""
    loader = EchoDataLoader(File(), 4, num_workers=2, worker_init_fn=worker_init_fn, echo_after=echo_after)
    assert [set(torch.cat(list(loader))[:, 1].tolist()) for _ in range(2)] == [{0}, {1}]


def test_what_is_set_between_epochs_reaches_a_data_set_taken_apart() -> None:
    data = File()
    data.open()
    loader = EchoDataLoader(data, 4, echo_after="read")
    list(loader)
    loader.dataset.handle = None
    with pytest.raises(OSError, match="not opened"):
        list(loader)


def double(example: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    example[0].mul_(2)
    return example


@pytest.mark.parametrize("echo_after", [None, "read"])
def test_an_augment_in_place_does_not_change_a_data_set_in_memory(echo_after: str | None) -> None:
    ones = torch.ones(8, 2)
    loader = EchoDataLoader(TensorDataset(ones), 4, factor=2, augment=double, echo_after=echo_after)
    for _ in range(2):
        assert torch.equal(torch.cat([batch[0] for batch in loader]), torch.full((16, 2), 2.0))
    assert torch.equal(ones, torch.ones(8, 2))


class Objects(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        boxes = np.empty(1, dtype=object)
        boxes[0] = np.ones(index + 1)
        return boxes


def double_boxes(boxes: Any) -> Any:
    boxes[0] *= 2
    return boxes


def test_an_augment_in_place_does_not_change_ragged_arrays() -> None:
    loader = EchoDataLoader(Objects(), 2, factor=3, augment=double_boxes, collate_fn=list, buffer=4)
    assert {value for batch in loader for boxes in batch for value in boxes[0]} == {2.0}


class Stops(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise StopIteration
        return index


@WORKERS
def test_a_stray_stop_iteration_does_not_end_the_epoch(num_workers: int) -> None:
    loader = EchoDataLoader(Stops(12), 2, num_workers=num_workers, factor=2, buffer=8)
    with pytest.raises(RuntimeError, match="StopIteration was raised: In the data set, index 5"):
        list(loader)


class Endless:
    """Has a length all the same."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(10)


def test_an_endless_sampler_with_a_length_goes_on() -> None:
    updates = iter(EchoDataLoader(Numbers(10), 2, sampler=Endless(), factor=2, buffer=8))
    assert all(0 <= number < 10 for _ in range(40) for number in next(updates).tolist())


class Columns(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"a": index, "b": index}

    def __getitems__(self, indices: list[int]) -> Any:
        return {"a": indices, "b": indices}


def test_columns_from_getitems_are_not_taken_for_examples() -> None:
    for batch in EchoDataLoader(Columns(8), 2, factor=2):
        assert batch["a"].equal(batch["b"])


def test_batches_of_arrays_tensors_and_ranges_are_batches_of_indices() -> None:
    batches = [np.array([1, 2]), torch.tensor([3, 4]), range(5, 7)]
    loader = EchoDataLoader(Numbers(10), batch_sampler=batches, factor=2)
    assert sorted(batch.tolist() for batch in loader) == [[1, 2], [1, 2], [3, 4], [3, 4], [5, 6], [5, 6]]


def test_a_sampler_that_is_an_array_can_be_continued() -> None:
    loader = EchoDataLoader(Numbers(10), 2, sampler=np.arange(10), factor=2)
    next(iter(loader))
    again = EchoDataLoader(Numbers(10), 2, sampler=np.arange(10), factor=2)
    again.load_state_dict(loader.state_dict())
    assert len(list(again)) == 9


def test_datapipes_are_refused() -> None:
    with pytest.raises(TypeError, match="shards DataPipes among workers in a way of its own"):
        EchoDataLoader(torch.utils.data.datapipes.iter.IterableWrapper(range(20)))
