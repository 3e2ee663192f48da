"""Studies whose runs take milliseconds: the metric follows from what the loader handed out."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stretto.study import Condition, MakeLoader, Outcome, Search, Settings, Study, Watcher
from stretto.study.records import Task

NUM_EXAMPLES = 40
BATCH_SIZE = 4
BASELINE = Condition.baseline(BATCH_SIZE)
BEFORE = Condition("before", 4.0, 4, BATCH_SIZE)
AFTER = Condition("after", 2.0, 4, BATCH_SIZE)
BATCH = Condition("batch", 2.0, 4, BATCH_SIZE)
WORKERS = Condition("workers", 4.0, 4, BATCH_SIZE)
CONDITIONS = (BASELINE, BEFORE)
PARAMS = {"lr": 0.1, "decay": 0.5}


def loader_of(batch_size: int = BATCH_SIZE, num_examples: int = NUM_EXAMPLES) -> DataLoader[Any]:
    """The numbers from 0 on, each a row, shuffled."""
    return DataLoader(TensorDataset(torch.arange(num_examples)), batch_size, shuffle=True)


def augment(batch: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Each number plus a random fraction of 1."""
    (numbers,) = batch
    return [numbers + torch.rand(len(numbers), generator=generator, dtype=torch.float64)]


def learn(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[float]:
    """The metric is what all updates' rates add up to, and a little of the seed."""
    learned = seed / 1000
    for update, _ in enumerate(make_loader(loader_of(settings.batch_size), augment)):
        learned += settings.rate(update)
        yield learned


def make_study(train: Callable[..., Any] = learn, **options: Any) -> Study:
    options = {
        "metric": "skill, points",
        "target": 1.0,
        "batch_size": BATCH_SIZE,
        "max_fresh_examples": 200,
        "lr": (0.01, 0.4),
        "buffer_batches": 4,
        **options,
    }
    return Study(train, **options)


class Seen(Watcher):
    """Remembers what was run."""

    def __init__(self) -> None:
        self.begun: list[tuple[Condition, str]] = []

    def begins(self, task: Task) -> None:
        self.begun.append((task.condition, task.key))


def searched(
    study: Study, storage: Path, conditions: Sequence[Condition] = CONDITIONS, **options: Any
) -> tuple[list[Outcome], Seen]:
    """The outcomes of a study that was run to its end here, and what was run for it."""
    seen = Seen()
    with Search(study, conditions, storage, **{"trials": 2, "seeds": 2, **options}) as search:
        search.work(seen)
        return search.outcomes(), seen


def timeless(outcomes: list[Outcome]) -> list[Any]:
    """What two machines would agree on."""
    return [
        (
            outcome.condition,
            outcome.best,
            outcome.is_done,
            [
                (*sorted(run.params.items()), run.seed, run.status, run.fresh_examples, run.best, run.final)
                for run in runs
            ],
        )
        for outcome in outcomes
        for runs in (outcome.trials, outcome.repeats)
    ]


def failing(
    is_to_fail: Callable[[Settings, int], bool], fail: Callable[[], None]
) -> Callable[..., Iterator[float]]:
    """`learn`, but `fail` is called in some runs after two updates."""

    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[float]:
        for update, value in enumerate(learn(settings, make_loader, seed)):
            if update == 2 and is_to_fail(settings, seed):
                fail()
            yield value

    train.__qualname__ = "learn"
    return train


def divide() -> None:
    1 / 0  # noqa: B018
