"""The conditions that the demonstration compares: where to echo, and how often."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from stretto.demo.job import Augment, Batch, CollateAndAugment
from stretto.demo.reader import ShardDataset
from stretto.echo.factor import Factor
from stretto.echo.loader import EchoLoader, echo
from stretto.echo.settings import Unit

BATCH_SIZE = 128
NUM_WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One way to feed the training job."""

    name: str
    title: str
    factor: Factor | None = None
    """None: the plain DataLoader, without stretto."""
    unit: Unit = "example"
    augments_each_use: bool = False
    """True: the echo point lies before the augmentation; False: after it."""
    max_factor: int | None = None
    buffer_batches: int | None = None

    def describe(self) -> str:
        """The settings in a few words, such as "e = 6, 16 batches"."""
        if self.factor is None:
            return ""
        parts = ["auto" if self.factor == "auto" else f"e = {self.factor:g}"]
        if self.max_factor is not None:
            parts.append(f"at most {self.max_factor}")
        if self.buffer_batches is not None:
            parts.append(f"{self.buffer_batches} batches")
        return ", ".join(parts)

    def feed(self, dataset: ShardDataset, seed: int) -> tuple[Iterable[Batch], EchoLoader | None]:
        """The batches of this condition, over passes without end if echoed, and the EchoLoader if there is one."""
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            num_workers=NUM_WORKERS,
            drop_last=True,
            collate_fn=None if self.augments_each_use else CollateAndAugment(),
            persistent_workers=True,
        )
        if self.factor is None:
            return loader, None
        augment = Augment(seed) if self.augments_each_use else None
        per_batch = BATCH_SIZE if self.unit == "example" else 1
        echoed = echo(
            loader,
            self.factor,
            unit=self.unit,
            buffer=None if self.buffer_batches is None else self.buffer_batches * per_batch,
            augment=augment,
            max_factor=self.max_factor,
            seed=seed,
        )
        return echoed, echoed


def conditions(ratio: float) -> list[Condition]:
    """The five conditions for R = `ratio`: no echo first, then every insertion point at e = R, then "auto"."""
    factor = max(1.0, float(math.floor(ratio)))
    buffer = 16
    return [
        Condition(name="none", title="no echo"),
        Condition(name="batch", title="batch echoing", factor=factor, unit="batch", buffer_batches=buffer),
        Condition(name="after", title="examples, after augmentation", factor=factor, buffer_batches=buffer),
        Condition(
            name="before",
            title="examples, before augmentation",
            factor=factor,
            augments_each_use=True,
            buffer_batches=buffer,
        ),
        Condition(
            name="auto",
            title='"auto", before augmentation',
            factor="auto",
            augments_each_use=True,
            max_factor=2 * round(factor),
            buffer_batches=2 * buffer,
        ),
    ]
