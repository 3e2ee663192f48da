"""A loader restored from a state goes on exactly where the saved one was, at every step."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import stretto
from stretto import EchoLoader
from tests.echo.sources import Numbers, await_arrivals, id_batches, through_file

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

Make = Callable[[], EchoLoader]

_builds = itertools.count(1)


def own_generator() -> torch.Generator:
    """A generator in another state in every process, as if seeded by the clock."""
    return torch.Generator().manual_seed(next(_builds))


def random_sampler(dataset: Numbers, **settings: Any) -> RandomSampler:
    return RandomSampler(dataset, generator=own_generator(), **settings)


def distributed_sampler(dataset: Numbers) -> DistributedSampler[int]:
    return DistributedSampler(dataset, num_replicas=2, rank=1)


DATA, TWICE = Numbers(11), Numbers(22)
SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: id_batches(4, 3, last=2),
    "sequential": lambda: DataLoader(DATA, 3),
    "shuffle": lambda: DataLoader(DATA, 3, shuffle=True),
    "own generator": lambda: DataLoader(DATA, 3, shuffle=True, generator=own_generator()),
    "RandomSampler": lambda: DataLoader(DATA, 3, sampler=random_sampler(DATA)),
    "replacement": lambda: DataLoader(DATA, 3, sampler=random_sampler(DATA, replacement=True, num_samples=40)),
    "batch_sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(random_sampler(DATA), 3, False)),
    "DistributedSampler": lambda: DataLoader(TWICE, 3, sampler=distributed_sampler(TWICE)),
    "stateful": lambda: StatefulDataLoader(DATA, 3),
    "stateful shuffle": lambda: StatefulDataLoader(DATA, 3, shuffle=True),
    "stateful DistributedSampler": lambda: StatefulDataLoader(TWICE, 3, sampler=distributed_sampler(TWICE)),
}
WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(DATA, 3, shuffle=True, num_workers=2),
    "own generator": lambda: DataLoader(DATA, 3, shuffle=True, generator=own_generator(), num_workers=2),
    "stateful shuffle": lambda: StatefulDataLoader(DATA, 3, shuffle=True, num_workers=2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "1": {"factor": 1},
    "2.5": {"factor": 2.5},
    "4, tight": {"factor": 4, "buffer": 4},
    "2.5, 7 updates": {"factor": 2.5, "updates_per_epoch": 7},
    "1, one pass": {"factor": 1, "carry_over": False},
    "2.5, one pass": {"factor": 2.5, "carry_over": False},
    "4, one pass, tight": {"factor": 4, "carry_over": False, "buffer": 4},
    "batch, 2.5": {"factor": 2.5, "unit": "batch"},
    "batch, 2.5, one pass": {"factor": 2.5, "unit": "batch", "carry_over": False, "buffer": 2},
    "batch, 7 updates": {"factor": 4, "unit": "batch", "updates_per_epoch": 7},
}


class Run:
    """Epochs of a loader, one update after another; "end" stands for the end of an epoch."""

    def __init__(self, loader: EchoLoader, num_epochs: int, *, is_auto: bool = False) -> None:
        self.loader = loader
        self.record: list[Any] = []
        self.counts: list[int] = []
        self._num_epochs = num_epochs
        self._is_auto = is_auto
        self._iterator: Any = None

    @property
    def is_over(self) -> bool:
        return self.loader.stats().epochs == self._num_epochs

    def step(self) -> None:
        self._iterator = self._iterator or iter(self.loader)
        if self._is_auto:
            await_arrivals(self.loader)
        batch = next(self._iterator, None)
        self.record.append("end" if batch is None else batch.tolist())
        if batch is None:
            self._iterator = None

    def finish_epochs(self) -> list[Any]:
        while not self.is_over:
            self.step()
        self.counts = counts(self.loader)
        return self.record

    def finish(self) -> list[Any]:
        with self.loader:
            return self.finish_epochs()


def assert_resumes_everywhere(make: Make, num_epochs: int, **how: Any) -> None:
    whole = Run(make(), num_epochs, **how)
    states = [through_file(whole.loader.state_dict())]
    while not whole.is_over:
        whole.step()
        states.append(through_file(whole.loader.state_dict()))
    whole.finish()
    for step, state in enumerate(states):
        resumed = Run(make(), num_epochs, **how)
        resumed.loader.load_state_dict(state)
        assert resumed.finish() == whole.record[step:], f"resumed after step {step}"
        assert resumed.counts == whole.counts


def assert_chain_of_resumes_equals_one_run(make: Make, num_epochs: int, **how: Any) -> None:
    """Save, throw away and restore after every single update: each state is that of a resumed run."""
    first = make()
    state = through_file(first.state_dict())
    whole = Run(first, num_epochs, **how).finish()
    record: list[Any] = []
    while len(record) < len(whole):
        link = Run(make(), num_epochs, **how)
        with link.loader as loader:
            loader.load_state_dict(state)
            link.step()
            state = through_file(loader.state_dict())
        record += link.record
        assert record == whole[: len(record)]


def counts(loader: EchoLoader) -> list[int]:
    stats = loader.stats()
    return [stats.epochs, stats.updates, stats.fresh_items, stats.uses, stats.duplicates, stats.dropped_uses]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("source", ["shuffle", "stateful shuffle"])
def test_resume_at_every_step_equals_the_uninterrupted_run(source: str, settings: dict[str, Any]) -> None:
    assert_resumes_everywhere(lambda: stretto.echo(SOURCES[source](), **settings), 2)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("source", ["shuffle", "stateful shuffle"])
def test_resume_of_a_resume_equals_the_uninterrupted_run(source: str, settings: dict[str, Any]) -> None:
    assert_chain_of_resumes_equals_one_run(lambda: stretto.echo(SOURCES[source](), **settings), 3)


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_loader_resumes(source: str, carry_over: bool) -> None:
    def make() -> EchoLoader:
        return stretto.echo(SOURCES[source](), 1.5, carry_over=carry_over, buffer=6)

    assert_resumes_everywhere(make, 2)
    assert_chain_of_resumes_equals_one_run(make, 3)


@pytest.mark.parametrize("source", WITH_WORKERS)
def test_loaders_with_workers_resume(source: str) -> None:
    assert_resumes_everywhere(lambda: stretto.echo(WITH_WORKERS[source](), 1.5, buffer=6, updates_per_epoch=5), 2)


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize("source", ["shuffle", "own generator", "stateful shuffle"])
def test_a_loader_in_use_goes_back_to_an_older_state(source: str, carry_over: bool) -> None:
    run = Run(stretto.echo(SOURCES[source](), 2.5, carry_over=carry_over, buffer=6), 3)
    for _ in range(4):
        run.step()
    state = through_file(run.loader.state_dict())
    whole = run.finish_epochs()
    with run.loader as loader:
        for _ in range(2):
            loader.load_state_dict(state)
            assert Run(loader, 3).finish_epochs() == whole[4:]


@pytest.mark.parametrize("settings", [{}, {"carry_over": False}, {"unit": "batch"}, {"updates_per_epoch": 5}])
def test_auto_resumes_where_arrivals_are_the_same(settings: dict[str, Any]) -> None:
    def make() -> EchoLoader:
        return stretto.echo(SOURCES["shuffle"](), "auto", max_factor=3, **settings)

    assert_resumes_everywhere(make, 2, is_auto=True)
    assert_chain_of_resumes_equals_one_run(make, 3, is_auto=True)
