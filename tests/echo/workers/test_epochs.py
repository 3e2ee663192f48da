"""EchoDataLoader over map-style data sets: every example its number of times, for any number of workers."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stretto import EchoDataLoader
from stretto.echo.factor import num_uses
from tests.echo.sources import Numbers
from tests.echo.workers.counted import Counted, Together, flat, indices, multiset, noisy

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
FOUR_ARE_MANY = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")


def numbers(batches: Any) -> list[int]:
    return [item for batch in batches for item in batch.tolist()]


@given(
    num_items=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    factor=st.sampled_from([1, 1.5, 2, 2.3, 4]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_len_is_the_number_of_batches(num_items: int, **arguments: Any) -> None:
    loader = EchoDataLoader(Numbers(num_items), buffer=16, **arguments)
    for epoch in range(2):
        expected = len(loader)
        assert len(list(loader)) == expected
        total = int(num_uses(float(arguments["factor"]), 0, epoch, 0, num_items).sum())
        size = arguments["batch_size"]
        assert expected == (total // size if arguments["drop_last"] else -(-total // size))


@pytest.mark.parametrize(
    "arguments",
    [
        {"factor": 2.5, "shuffle": True},
        {"factor": 1.3, "drop_last": True},
        {"factor": 1, "shuffle": True},
        {"factor": 3, "shuffle": True, "drop_last": True, "persistent_workers": True},
    ],
)
def test_len_is_the_number_of_batches_with_workers(arguments: dict[str, Any]) -> None:
    loader = EchoDataLoader(Numbers(29), 3, num_workers=2, buffer=8, **arguments)
    for _ in range(2):
        expected = len(loader)
        iterator = iter(loader)
        assert len(loader) == expected  # during the epoch too
        assert len(list(iterator)) == expected


@given(
    num_items=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    factor=st.sampled_from([1, 1.5, 2, 2.3, 4]),
    room=st.integers(0, 20),
    seed=st.integers(0, 3),
)
@settings(max_examples=25)
def test_each_example_is_read_once_and_used_its_number_of_times(
    num_items: int, batch_size: int, factor: float, room: int, seed: int
) -> None:
    data = Together(num_items)
    loader = EchoDataLoader(data, batch_size, factor=factor, buffer=batch_size + room, seed=seed)
    for epoch in range(2):
        batches = indices(loader)
        due = num_uses(float(factor), seed, epoch, 0, num_items).tolist()
        assert Counter(index for batch in batches for index in batch) == dict(enumerate(due))
        assert data.reads() == [1] * num_items
        stats = loader.stats()
        assert stats.reads == stats.fresh_items == (epoch + 1) * num_items
        assert (stats.reread, stats.resident_items, stats.dropped_uses) == (0, 0, 0)


@WORKERS
@pytest.mark.parametrize("is_persistent", [False, True])
def test_each_example_is_read_once_an_epoch(num_workers: int, is_persistent: bool) -> None:
    data = Counted(48)
    loader = EchoDataLoader(
        data,
        6,
        shuffle=True,
        factor=3,
        num_workers=num_workers,
        persistent_workers=is_persistent and num_workers > 0,
        buffer=20,
    )
    for epoch in range(1, 4):
        assert Counter(flat(loader)) == dict.fromkeys(range(48), 3)
        assert data.reads() == [1] * 48
        stats = loader.stats()
        assert (stats.reads, stats.fresh_items, stats.uses) == (48 * epoch, 48 * epoch, 144 * epoch)
        assert (stats.epochs, stats.updates, stats.reread) == (epoch, 24 * epoch, 0)


def noisy_epochs(num_epochs: int, **arguments: Any) -> list[Counter[tuple[float, ...]]]:
    arguments = {"batch_size": 6, "shuffle": True, "factor": 2.5, "augment": noisy} | arguments
    loader = EchoDataLoader(Counted(24), **arguments)
    return [multiset(loader) for _ in range(num_epochs)]


@FOUR_ARE_MANY
def test_an_epoch_has_the_same_examples_for_any_number_of_workers() -> None:
    first = noisy_epochs(2)
    for num_workers in (1, 2, 4):
        assert noisy_epochs(2, num_workers=num_workers) == first
    assert noisy_epochs(2, num_workers=2, persistent_workers=True, buffer=12) == first
    assert noisy_epochs(2, batch_size=5) == first


def test_every_use_of_every_epoch_has_its_own_randomness() -> None:
    seen = Counter[tuple[float, ...]]()
    for seed in (0, 1):
        for examples in noisy_epochs(3, seed=seed, num_workers=2):
            assert examples.total() in range(24 * 2, 24 * 3 + 1)
            seen += examples
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("factor", [1, 2.5, "auto"])
def test_global_random_states_stay_as_they_are(factor: float) -> None:
    def states() -> list[bytes]:
        of_numpy = np.random.get_state(legacy=False)
        return [torch.get_rng_state().numpy().tobytes(), repr(of_numpy).encode(), repr(random.getstate()).encode()]

    class Random(Counted):
        def __getitem__(self, index: int) -> Any:
            return noisy(super().__getitem__(index))[1:]

    before = None
    loader = EchoDataLoader(Random(30), 4, shuffle=True, factor=factor, augment=noisy)
    iterator = iter(loader)  # torch draws the workers' seed here
    before = states()
    for _ in iterator:
        assert states() == before


@WORKERS
def test_a_sampler_may_return_an_index_twice(num_workers: int) -> None:
    data = Counted(6)
    order = [0, 1, 1, 5, 0, 1, 3]
    loader = EchoDataLoader(data, 2, sampler=order, factor=2, num_workers=num_workers, buffer=4, augment=noisy)
    for _ in range(2):
        examples = multiset(loader)
        assert set(examples.values()) == {1}  # its two places have other random states
        assert Counter(example[0] for example in examples) == {0: 4, 1: 6, 5: 2, 3: 2}
        assert data.reads() == [2, 3, 0, 1, 0, 1]


@WORKERS
def test_weighted_sampling_with_replacement(num_workers: int) -> None:
    data = Counted(10)
    weights = [0.0, 1, 1, 1, 5, 5, 0, 0, 1, 1]
    sampler = WeightedRandomSampler(weights, 40, replacement=True)
    loader = EchoDataLoader(data, 4, sampler=sampler, factor=2, num_workers=num_workers, buffer=12)
    epochs = []
    for _ in range(2):
        used = Counter(flat(loader))
        epochs.append(used)
        assert used == {index: 2 * count for index, count in enumerate(data.reads()) if count}
        assert used.total() == 80
        assert not used.keys() & {0, 6, 7}
    assert epochs[0] != epochs[1]


SAMPLERS = {
    "list": [4, 2, 9, 3, 0],
    "range": range(1, 8, 2),
    "random subset": SubsetRandomSampler([3, 1, 7]),
    "sequential": SequentialSampler(range(5)),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_samplers_of_ones_own(sampler: Any) -> None:
    loader = EchoDataLoader(Numbers(10), 2, sampler=sampler, factor=2)
    assert sorted(numbers(loader)) == sorted([*sampler, *sampler])
    assert len(loader) == len(list(sampler))


class Varied(Sampler[list[int]]):
    """Batches of lengths from 1 to 4."""

    batches = ([0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@WORKERS
def test_a_given_batch_sampler_keeps_its_batches_whole(num_workers: int) -> None:
    data = Counted(12)
    loader = EchoDataLoader(
        data, batch_sampler=Varied(), factor=3, num_workers=num_workers, buffer=4, augment=noisy
    )
    assert (len(loader), loader.batch_size) == (15, None)
    num_reads = 0
    for epoch in range(1, 3):
        batches = [*loader]
        assert Counter(map(tuple, indices(batches))) == {tuple(batch): 3 for batch in Varied.batches}
        assert set(multiset(batches).values()) == {1}
        num_reads += sum(data.reads())
        assert_only_lanes_out_of_step_read_again(loader, num_reads, 12 * epoch)
        stats = loader.stats()
        assert (stats.updates, stats.fresh_batches, stats.fresh_items) == (15 * epoch, 5 * epoch, 12 * epoch)


def test_a_random_batch_sampler_is_keyed() -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        inner = RandomSampler(range(20), generator=torch.Generator().manual_seed(seed))
        loader = EchoDataLoader(Numbers(20), batch_sampler=BatchSampler(inner, 5, True), factor=2)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    first, second = epochs(0)
    assert epochs(0) == [first, second]
    assert first != second
    assert epochs(1)[0] != first
    assert all(first.count(batch) == 2 for batch in first)
    assert len(first) == 8


@WORKERS
def test_without_a_batch_size_examples_come_one_by_one(num_workers: int) -> None:
    data = Counted(9)
    loader = EchoDataLoader(data, batch_size=None, shuffle=True, factor=2, num_workers=num_workers, buffer=6)
    assert len(loader) == 18
    num_reads = 0
    for epoch in range(1, 3):
        examples = [*loader]
        assert all(example.shape == (3,) for example in examples)
        assert Counter(int(example[0]) for example in examples) == dict.fromkeys(range(9), 2)
        num_reads += sum(data.reads())
        assert_only_lanes_out_of_step_read_again(loader, num_reads, 9 * epoch)


def assert_only_lanes_out_of_step_read_again(loader: EchoDataLoader, num_reads: int, num_examples: int) -> None:
    """With batches smaller than the factor lanes may end at different times, which sends some uses elsewhere."""
    stats = loader.stats()
    assert num_reads == stats.reads == num_examples + stats.reread
    if loader.num_workers == 0:
        assert stats.reread == 0


def test_a_generator_decides_the_order_by_its_seed_and_is_not_drawn_from() -> None:
    def epochs(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        loader = EchoDataLoader(Numbers(30), 4, shuffle=True, generator=generator, factor=2)
        return [numbers(loader), numbers(loader)]

    first, second = epochs(3)
    assert epochs(3) == [first, second]
    assert first != second
    assert epochs(4)[0] != first


@WORKERS
def test_factor_1_is_the_plain_loader(num_workers: int) -> None:
    arguments = {"batch_size": 4, "num_workers": num_workers}
    plain = [set(batch.tolist()) for batch in DataLoader(Numbers(30), **arguments)]
    for buffer in (100, None, 4):
        loader = EchoDataLoader(Numbers(30), **arguments, buffer=buffer, factor=1)
        assert [set(batch.tolist()) for batch in loader] == plain
        assert len(loader) == 8


def test_set_epoch_numbers_the_first_epoch() -> None:
    whole = noisy_epochs(4)
    loader = EchoDataLoader(Counted(24), 6, True, factor=2.5, augment=noisy)
    loader.set_epoch(2)
    assert multiset(loader) == whole[2]
    loader.set_epoch(0)  # a trainer calls it before every epoch: too late
    assert multiset(loader) == whole[3]


def test_an_epoch_that_was_left_is_over() -> None:
    whole = noisy_epochs(2)
    loader = EchoDataLoader(Counted(24), 6, True, factor=2.5, augment=noisy)
    for _ in islice(loader, 3):
        pass
    assert multiset(loader) == whole[1]
    stats = loader.stats()
    assert stats.epochs == 1
    assert stats.dropped_uses == whole[0].total() - 3 * 6


@WORKERS
def test_a_subset(num_workers: int) -> None:
    data = Together(20)
    chosen = [3, 5, 8, 13, 19]
    loader = EchoDataLoader(Subset(data, chosen), 2, True, factor=2, num_workers=num_workers, buffer=4)
    assert sorted(flat(loader)) == sorted([*chosen, *chosen])
    assert data.reads() == [int(index in chosen) for index in range(20)]


def test_a_batch_larger_than_the_data_set_uses_examples_twice_and_counts_that() -> None:
    data = Together(2)
    loader = EchoDataLoader(data, 4, factor=4, buffer=8)
    assert [sorted(batch) for batch in indices(loader)] == [[0, 0, 1, 1]] * 2
    assert data.reads() == [1, 1]
    assert loader.stats().duplicates == 4


@WORKERS
def test_sizes_are_probed_once(num_workers: int) -> None:
    data = Counted(100)
    loader = EchoDataLoader(data, 4, factor=2, num_workers=num_workers)
    for _ in loader:
        pass
    assert data.reads() == [2] * 64 + [1] * 36
    for _ in loader:
        pass
    assert data.reads() == [1] * 100
    assert loader.stats().reads == 200
