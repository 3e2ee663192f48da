"""Studies whose runs take milliseconds: the metric follows from what the loader handed out."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stretto.study import Condition, MakeLoader, Settings, Study

NUM_EXAMPLES = 40
BATCH_SIZE = 4
BASELINE = Condition.baseline(BATCH_SIZE)
BEFORE = Condition("before", 4.0, 4, BATCH_SIZE)
AFTER = Condition("after", 2.0, 4, BATCH_SIZE)
BATCH = Condition("batch", 2.0, 4, BATCH_SIZE)
WORKERS = Condition("workers", 4.0, 4, BATCH_SIZE)
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
