"""The state of an EchoDataLoader: at every step it gives the rest of the run, exactly, in a new loader."""

import io
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

import stretto
from stretto import EchoDataLoader
from stretto.echo.workers.pace import Pace
from tests.echo.sources import through_file
from tests.echo.workers.counted import Counted, noisy

Make = Callable[[], EchoDataLoader]
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
NUM_EPOCHS = 2


class Run:
    """Epochs of a loader, one step after another; "end" stands for the end of an epoch."""

    def __init__(self, loader: EchoDataLoader) -> None:
        self.loader = loader
        self._iterator: Any = None

    def step(self) -> Any:
        self._iterator = self._iterator or iter(self.loader)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None
        return "end" if batch is None else batch.tolist()

    def finish(self) -> list[Any]:
        """All steps up to the end of the last epoch."""
        record = []
        while self.loader.stats().epochs < NUM_EPOCHS:
            record.append(self.step())
        return record


def counts(loader: EchoDataLoader) -> list[int]:
    stats = loader.stats()
    return [stats.epochs, stats.updates, stats.fresh_items, stats.uses, stats.duplicates, stats.dropped_uses]


def assert_resumes_everywhere(make: Make) -> None:
    first = make()
    whole = Run(first)
    states, record = [through_file(first.state_dict())], []
    while first.stats().epochs < NUM_EPOCHS:
        record.append(whole.step())
        states.append(through_file(first.state_dict()))
    assert record.count("end") == NUM_EPOCHS
    for at, state in enumerate(states):
        loader = make()
        loader.load_state_dict(state)
        assert Run(loader).finish() == record[at:], f"resumed after step {at}"
        assert counts(loader) == counts(first)


def assert_chain_of_resumes_equals_one_run(make: Make) -> None:
    """Save, throw away and restore after every single step: each state is that of a resumed run."""
    state = through_file(make().state_dict())
    whole = Run(make()).finish()
    record: list[Any] = []
    while len(record) < len(whole):
        loader = make()
        loader.load_state_dict(state)
        assert loader.state_dict() == state  # before it goes on
        record.append(Run(loader).step())
        state = through_file(loader.state_dict())
        assert record[-1] == whole[len(record) - 1]


SETTINGS: dict[str, dict[str, Any]] = {
    "2.5": {"factor": 2.5},
    "3, tight, drop_last": {"factor": 3, "buffer": 8, "drop_last": True},
    "1": {"factor": 1},
    "bytes": {"factor": 2, "buffer": "1MiB"},
    "replacement": {"factor": 2, "shuffle": None, "sampler": RandomSampler(range(11), replacement=True)},
    "batch_sampler": {"factor": 2, "shuffle": None, "batch_size": 1, "batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "single": {"factor": 2, "batch_size": None},
}


def maker(num_workers: int, **settings: Any) -> Make:
    """With workers, which take a while to start, there are fewer steps."""
    num_items, batch_size = (8, 6) if num_workers else (11, 4)
    settings = {"batch_size": batch_size, "shuffle": True, "augment": noisy, "buffer": 16} | settings
    return lambda: EchoDataLoader(Counted(num_items), num_workers=num_workers, **settings)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_resume_at_every_step_equals_the_uninterrupted_run(settings: dict[str, Any]) -> None:
    assert_resumes_everywhere(maker(0, **settings))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_resume_of_a_resume_equals_the_uninterrupted_run(settings: dict[str, Any]) -> None:
    assert_chain_of_resumes_equals_one_run(maker(0, **settings))


def test_resume_at_every_step_with_workers() -> None:
    assert_resumes_everywhere(maker(2, factor=2.5))


def test_resume_of_a_resume_with_workers() -> None:
    assert_chain_of_resumes_equals_one_run(maker(2, factor=2.5))


@WORKERS
def test_auto_resumes_with_the_factors_it_chose(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {10: 1.7, 30: 2.4}
    monkeypatch.setattr(Pace, "factor", lambda self, present, num_updates: chosen[num_updates])

    def make() -> EchoDataLoader:
        return EchoDataLoader(
            Counted(110), 4, True, factor="auto", max_factor=3, num_workers=num_workers, augment=noisy, buffer=24
        )

    first = make()
    batches, states = [], []
    for batch in first:
        batches.append(batch.tolist())
        states.append(through_file(first.state_dict()))
    assert 30 < len(batches) < 100
    monkeypatch.setattr(Pace, "factor", lambda self, present, num_updates: pytest.fail("chosen anew"))
    for at in (31, 36):
        assert dict(states[at]["factors"]) == {0: 1.0} | chosen
        loader = make()
        loader.load_state_dict(states[at])
        assert [batch.tolist() for batch in loader] == batches[at + 1 :]


def test_auto_begins_the_next_epoch_with_the_last_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "factor", lambda self, present, num_updates: 1.7)
    first = EchoDataLoader(Counted(60), 4, True, factor="auto", max_factor=3)
    for _ in first:
        pass
    loader = EchoDataLoader(Counted(60), 4, True, factor="auto", max_factor=3)
    loader.load_state_dict(through_file(first.state_dict()))
    batches = [batch.tolist() for batch in loader]
    assert len(batches) == pytest.approx(60 * 1.7 / 4, abs=2)
    assert [batch.tolist() for batch in first] == batches


@WORKERS
def test_a_state_is_small_and_has_no_data(num_workers: int) -> None:
    sizes = []
    for n in (40, 4000):
        loader = EchoDataLoader(Counted(n), 4, True, factor=2, num_workers=num_workers)
        for _ in islice(loader, 15):
            pass
        file = io.BytesIO()
        torch.save(loader.state_dict(), file)
        sizes.append(file.tell())
    assert max(sizes) < 4096
    assert abs(sizes[0] - sizes[1]) < 200


@pytest.mark.parametrize(("num_workers", "is_persistent"), [(0, False), (2, False), (2, True)])
def test_after_a_break_the_state_gives_the_rest_of_the_epoch(num_workers: int, is_persistent: bool) -> None:
    make = maker(num_workers, factor=2.5, persistent_workers=is_persistent)
    whole = Run(make()).finish()
    loader = make()
    for at, _ in enumerate(loader):
        if at == 2:
            break
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(through_file(state))
    assert Run(resumed).finish() == whole[3:]
    # The loader itself goes on with the next epoch, or goes back when told to.
    assert Run(loader).step() == whole[whole.index("end") + 1]
    loader.load_state_dict(state)
    assert Run(loader).finish() == whole[3:]


@WORKERS
def test_what_was_resident_is_read_again_once_after_a_resume_and_counted(num_workers: int) -> None:
    def make(data: Counted) -> EchoDataLoader:
        return EchoDataLoader(data, 6, True, factor=3, num_workers=num_workers, buffer=24)

    first = make(Counted(48))
    iterator = iter(first)
    for _ in range(12):
        next(iterator)
    state = first.state_dict()
    num_entered = first.stats().fresh_items
    del iterator
    data = Counted(48)
    loader = make(data)
    loader.load_state_dict(state)
    num_batches = len([*loader])
    assert num_batches == 12
    stats = loader.stats()
    reads = data.reads()
    assert max(reads) == 1
    assert stats.reads == sum(reads)
    assert 0 < stats.reread <= 24
    assert stats.reads == stats.reread + 48 - num_entered
    assert stats.fresh_items == 48
    for _ in loader:
        pass
    assert data.reads() == [1] * 48
    assert loader.stats().reread == stats.reread


def load(state: dict[str, Any], **changed: Any) -> None:
    settings = {"dataset": Counted(11), "batch_size": 4, "shuffle": True, "factor": 2.5, "buffer": 16} | changed
    EchoDataLoader(**settings).load_state_dict(state)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"num_workers": 2}, "num_workers=0, this loader has num_workers=2"),
    "batch": ({"batch_size": 5}, "batch_size=4, this loader has batch_size=5"),
    "seed": ({"seed": 1}, "seed=0, this loader has seed=1"),
    "factor": ({"factor": 2}, "factor=2.5, this loader has factor=2.0"),
    "auto": ({"factor": "auto"}, "factor=2.5, this loader has factor='auto'"),
    "buffer": ({"buffer": "1MB"}, "buffer=16, this loader has buffer='1MB'"),
    "drop_last": ({"drop_last": True}, "drop_last=False, this loader has drop_last=True"),
    "length": ({"dataset": Counted(12)}, r"len\(sampler\)=11, this loader has len\(sampler\)=12"),
    "order": (
        {"shuffle": False},
        r"samplers=\['RandomSampler'\], this loader has samplers=\['SequentialSampler'\]",
    ),
}


@pytest.mark.parametrize(("changed", "message"), CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("num_steps", [0, 3, 7])
def test_another_setting_is_refused_with_both_values(changed: dict[str, Any], message: str, num_steps: int) -> None:
    loader = EchoDataLoader(Counted(11), 4, True, factor=2.5, buffer=16)
    for _ in islice(loader, num_steps):
        pass
    state = through_file(loader.state_dict())
    load(state)
    with pytest.raises(ValueError, match=f"the state was saved with {message}: load it into"):
        load(state, **changed)


class Unknown(Sampler[int]):
    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11).tolist())


class Numbered(Unknown):
    """A sampler whose order can be made again."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10, -1, -1))


@pytest.mark.parametrize("sampler", [Unknown(), Backwards(range(11))])
def test_a_sampler_whose_order_cannot_be_made_again_is_refused(sampler: Any) -> None:
    def make() -> EchoDataLoader:
        return EchoDataLoader(Counted(11), 4, sampler=sampler, factor=2)

    loader = make()
    before = loader.state_dict()
    next(iter(loader))
    name = type(sampler).__name__
    with pytest.raises(ValueError, match=f"the order of {name} cannot be made again.*expected a sampler with"):
        make().load_state_dict(loader.state_dict())
    make().load_state_dict(before)  # nothing was drawn yet


def test_a_sampler_with_set_epoch_resumes() -> None:
    assert_resumes_everywhere(
        lambda: EchoDataLoader(Counted(11), 4, sampler=Numbered(), factor=2, augment=noisy, buffer=16)
    )


class Unsized(Sampler[int]):
    """Has no length; its order is that of its generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11, generator=self.generator).tolist())


def test_a_sampler_without_a_length_resumes() -> None:
    assert_resumes_everywhere(
        lambda: EchoDataLoader(Counted(11), 4, sampler=Unsized(), factor=2, augment=noisy, buffer=16)
    )


def test_a_generator_of_another_seed_is_restored() -> None:
    def make(seed: int) -> EchoDataLoader:
        generator = torch.Generator().manual_seed(seed)
        return EchoDataLoader(Counted(11), 4, True, factor=2, generator=generator)

    whole = Run(make(1)).finish()
    loader = make(1)
    run = Run(loader)
    assert [run.step() for _ in range(3)] == whole[:3]
    resumed = make(2)
    resumed.load_state_dict(through_file(loader.state_dict()))
    assert Run(resumed).finish() == whole[3:]


@pytest.mark.parametrize("state", [{}, {"version": 2, "num_residents": 1}, {"version": 1}, None, [1]])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match=f"the state is a {type(state).__name__} of version .*, expected 1"):
        load(state)
    foreign = stretto.echo([torch.zeros(2)] * 3, 2)
    with foreign, pytest.raises(ValueError, match="it was not saved by EchoDataLoader"):
        load(foreign.state_dict())
