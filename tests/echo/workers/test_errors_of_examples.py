"""Examples that raise: the error names them, or they are left out, counted and bounded."""

import multiprocessing
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from stretto import EchoDataLoader, StagedDataset
from tests.echo.workers.counted import Counted, double_decode, flat

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
PERSISTENT = pytest.mark.parametrize("is_persistent", [False, True])


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
