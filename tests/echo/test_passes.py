"""Pass numbers, orders and randomness of what is wrapped."""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import stretto
from tests.echo.sources import Numbers, Rising, epoch, flat, id_batches

DATA = Numbers(12)
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def passes_of(source: Any, num_passes: int, **settings: Any) -> list[list[int]]:
    """The order of each pass, read with one use of each item."""
    with stretto.echo(source, 1, unit="batch", buffer=1, carry_over=False, **settings) as loader:
        return [flat(epoch(loader)) for _ in range(num_passes)]


def distributed(num_workers: int = 0) -> DataLoader[int]:
    sampler: DistributedSampler[int] = DistributedSampler(DATA, num_replicas=2, rank=0)
    return DataLoader(DATA, 2, sampler=sampler, num_workers=num_workers)


def expected_orders(num_passes: int, start: int = 0) -> list[list[int]]:
    sampler: DistributedSampler[int] = DistributedSampler(DATA, num_replicas=2, rank=0)
    orders = []
    for number in range(start, start + num_passes):
        sampler.set_epoch(number)
        orders.append([*sampler])
    return orders


@WORKERS
def test_a_trainer_that_sets_the_epoch_itself_gets_four_different_orders_in_four_passes(num_workers: int) -> None:
    source = distributed(num_workers)
    fresh: list[int] = []
    with stretto.echo(source, 4, unit="batch", buffer=1) as loader:
        for number in range(5):
            source.sampler.set_epoch(number)  # as every trainer does, while later passes are being fetched
            for batch in loader:
                if batch.tolist() != fresh[-2:]:
                    fresh += batch.tolist()
    passes = [fresh[at : at + 6] for at in range(0, 24, 6)]
    assert passes == expected_orders(4)
    assert len({tuple(order) for order in passes}) == 4


@WORKERS
def test_orders_do_not_depend_on_what_the_trainer_sets(num_workers: int) -> None:
    source = distributed(num_workers)
    with stretto.echo(source, 1, unit="batch", buffer=1) as loader:
        orders = []
        for number in (0, 7, 3, 3):
            orders.append([])
            for batch in loader:
                orders[-1] += batch.tolist()
                source.sampler.set_epoch(number)
    assert orders == expected_orders(4)


def test_set_epoch_before_the_first_pass_aligns_the_counter() -> None:
    with stretto.echo(distributed(), 1, unit="batch", buffer=1) as loader:
        loader.set_epoch(5)
        first = flat(epoch(loader))
        loader.set_epoch(40)  # a trainer that goes on calling it changes nothing
        second = flat(epoch(loader))
        assert loader.stats().passes == 6
    assert [first, second] == expected_orders(2, start=5)


def test_everything_that_counts_epochs_is_told() -> None:
    class Counting(IterableDataset[int]):
        def __init__(self) -> None:
            self.told: list[int] = []

        def set_epoch(self, number: int) -> None:
            self.told.append(number)

        def __iter__(self) -> Iterator[int]:
            return iter([1000 * self.told[-1], 1000 * self.told[-1] + 1])

    data = Counting()
    assert passes_of(DataLoader(data, 1), 3) == [[0, 1], [1000, 1001], [2000, 2001]]
    assert passes_of(Rising(1, 2), 3) == [[0, 1], [1000, 1001], [2000, 2001]]


def test_the_sampler_inside_a_batch_sampler_is_told() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(DATA, num_replicas=2, rank=0)
    source = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    assert passes_of(source, 3) == expected_orders(3)


SHUFFLED: dict[str, Callable[[], DataLoader[int]]] = {
    "shuffle": lambda: DataLoader(DATA, 3, shuffle=True),
    "workers": lambda: DataLoader(DATA, 3, shuffle=True, num_workers=2),
    "RandomSampler": lambda: DataLoader(DATA, 3, sampler=RandomSampler(DATA, replacement=True, num_samples=40)),
    "SubsetRandomSampler": lambda: DataLoader(DATA, 3, sampler=SubsetRandomSampler(range(8))),
    "WeightedRandomSampler": lambda: DataLoader(DATA, 3, sampler=WeightedRandomSampler([1.0] * 12, 12)),
    "batch_sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)),
}


@pytest.mark.parametrize("make", SHUFFLED.values(), ids=SHUFFLED.keys())
def test_random_samplers_without_a_generator_are_keyed_by_seed_and_pass(make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    one = passes_of(make(), 3)
    torch.manual_seed(2)
    assert passes_of(make(), 3) == one
    assert len({tuple(order) for order in one + passes_of(make(), 3, seed=1)}) == 6


def test_a_generator_of_the_users_own_is_kept() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(DATA, 3, shuffle=True, generator=torch.Generator().manual_seed(5))

    plain = make()
    expected = [[item for batch in plain for item in batch.tolist()] for _ in range(3)]
    assert passes_of(make(), 3) == expected == passes_of(make(), 3, seed=9)


def global_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), name, keys.tolist(), rest, random.getstate()


@WORKERS
@pytest.mark.parametrize("factor", [2, "auto"])
def test_the_global_random_state_is_never_touched(num_workers: int, factor: Any) -> None:
    before = global_states()
    with stretto.echo(DataLoader(DATA, 3, shuffle=True, num_workers=num_workers), factor) as loader:
        for _ in range(2):
            epoch(loader)
    assert global_states() == before


class Noisy(Numbers):
    """Draws from a global random state, as torchvision's transforms do."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(12)
        self.draw = draw

    def __getitem__(self, index: int) -> int:
        self.draw()
        return index


DRAWS = [lambda: torch.rand(1), np.random.rand, random.random]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("draw", DRAWS, ids=["torch", "numpy", "random"])
def test_a_data_set_that_draws_in_the_thread_is_warned_of_once(draw: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught, stretto.echo(DataLoader(Noisy(draw), 3), 1) as loader:
        warnings.simplefilter("always")
        for _ in range(3):
            epoch(loader)
    assert [warning.category for warning in caught] == [UserWarning]
    assert "draws from the global random state" in str(caught[0].message)


def test_a_data_set_that_draws_in_worker_processes_is_not_warned_of() -> None:
    with stretto.echo(DataLoader(Noisy(random.random), 3, num_workers=2), 1) as loader:
        assert len(epoch(loader)) == 4


def test_draws_differ_between_epochs_and_seeds_and_are_equal_for_equal_ones() -> None:
    def epochs(seed: int) -> list[list[int]]:
        with stretto.echo(id_batches(6, 4), 2, carry_over=False, seed=seed) as loader:
            return [flat(epoch(loader)) for _ in range(3)]

    assert epochs(0) == epochs(0)
    assert len({tuple(order) for order in epochs(0) + epochs(1)}) == 6


def test_several_ranks_on_an_unsharded_loader_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    with stretto.echo(DataLoader(DATA, 3, shuffle=True), 1) as loader:
        with pytest.warns(UserWarning, match="there are 4 ranks, but the wrapped loader's sampler is not sharded"):
            iter(loader)
        assert len(epoch(loader)) == 4
    with stretto.echo(distributed(), 1) as loader:
        assert len(epoch(loader)) == 3
        settings = loader.state_dict()["settings"]
    assert (settings["rank"], settings["world_size"]) == (1, 4)


class Refilled:
    """Yields one tensor, filled anew for every batch, as some pipelines do."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.zeros(2, dtype=torch.long)
        for number in range(8):
            batch.copy_(torch.tensor([2 * number, 2 * number + 1]))
            yield batch


@pytest.mark.parametrize("unit", ["example", "batch"])
def test_a_loader_may_fill_one_tensor_again_and_again(unit: Any) -> None:
    with stretto.echo(Refilled(), 2, unit=unit, carry_over=False) as loader:
        assert sorted(flat(epoch(loader))) == sorted([*range(16), *range(16)])


def test_a_stateful_loader_without_a_generator_is_keyed_by_the_seed() -> None:
    def order(seed: int) -> list[int]:
        source = StatefulDataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True)
        with stretto.echo(source, 2, seed=seed) as loader:
            return [number for batch in loader for number in batch[0].tolist()]

    assert order(1) == order(1) != order(2)


def test_closing_gives_a_samplers_own_generator_back() -> None:
    source = StatefulDataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True)
    before = source.batch_sampler.sampler.generator
    with stretto.echo(source, 2) as loader:
        next(iter(loader))
        assert source.batch_sampler.sampler.generator is not before
    assert source.batch_sampler.sampler.generator is before


def test_a_pass_that_ends_before_its_length_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Short(list):
        def __len__(self) -> int:
            return 5

    with stretto.echo(Short([torch.zeros(2), torch.zeros(2)]), 1) as loader:
        list(loader)
    assert "pass 0 ended after 2 of 5 batches" in caplog.text
