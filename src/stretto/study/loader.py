"""The loader of one run: the user's fresh batches, echoed as the condition says, and counted.

batch, after:  fresh -> augment -> echo -> step        none: the same with every batch used once
before:        fresh -> echo -> augment -> step
workers:       the same, example by example in the workers of `fresh`; see in_workers.py
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stretto.echo.keyed import derive_key
from stretto.echo.loader import echo
from stretto.echo.stats import EchoStats
from stretto.study.conditions import Condition
from stretto.study.in_workers import Augment, InWorkers
from stretto.study.study import TrainError
from stretto.tree import flatten

_AUGMENT = 0x5D7  # the purpose of the stream that keys augmentations
_ENDLESS = 2**40  # updates in an epoch: passes run on, and no run sees its end
_FORWARDED = ("batch_sampler", "dataset", "num_workers", "sampler", "set_epoch")


class MakeLoader:
    """Called once by a training function: `make_loader(fresh, augment)` yields batches without end.

    `fresh` is a re-iterable of the batches before augmentation, of `condition.batch_size` examples each; for the
    variant "workers" a torch DataLoader over a map-style data set.
    """

    def __init__(self, condition: Condition, seed: int, *, has_augment: bool = True) -> None:
        self._condition = condition
        self._seed = seed
        self._has_augment = has_augment
        self._fed: _Echoed | InWorkers | None = None
        self.began_s: float | None = None
        """When it was called, as time.perf_counter tells."""
        self.max_draws: int | None = None
        """Batches that may be taken between two updates."""
        self.draws = 0
        """Those taken since the latest one."""

    def __call__(self, fresh: Iterable[Any], augment: Augment | None = None) -> Iterator[Any]:
        """Batches for the updates.

        Raises TrainError if called twice, if `augment` is not as the study says, or for "workers" if `fresh` is
        not what that needs.
        """
        if self._fed is not None:
            raise TrainError(
                "make_loader was called twice in one run: it is for the training data only; iterate a loader of "
                "test data as it is"
            )
        if (augment is not None) != self._has_augment:
            found = "no augmentation" if augment is None else "an augmentation"
            raise TrainError(
                f"make_loader got {found}, but the study says has_augment={self._has_augment}: expected them to "
                "agree"
            )
        feed = InWorkers if self._condition.variant == "workers" else _Echoed
        self._fed = feed(fresh, self._condition, self._seed, augment)
        self.began_s = time.perf_counter()
        return _Watched(self, iter(self._fed))

    @property
    def was_called(self) -> bool:
        """Whether there is a loader."""
        return self._fed is not None

    @property
    def fresh_examples(self) -> int:
        """Examples read for the updates so far."""
        return 0 if self._fed is None else self._fed.fresh_examples

    def stats(self) -> EchoStats:
        """Of the echo."""
        assert self._fed is not None
        return self._fed.stats()

    def close(self) -> None:
        """End the loader's thread or its workers."""
        if self._fed is not None:
            self._fed.close()


def make_loader(condition: Condition, seed: int, *, has_augment: bool = True) -> MakeLoader:
    """What a training function gets for a run with this condition and seed."""
    return MakeLoader(condition, seed, has_augment=has_augment)


class _Watched(Iterator[Any]):
    """The loader's batches, as long as updates are told of: a training that never yields would never end."""

    def __init__(self, make: MakeLoader, batches: Iterator[Any]) -> None:
        self._make = make
        self._batches = batches

    def __next__(self) -> Any:
        make = self._make
        make.draws += 1
        if make.max_draws is not None and make.draws > make.max_draws:
            raise TrainError(
                f"train took {make.draws - 1:,} batches, as many as the whole budget has, without a yield: "
                "expected a generator, which yields once after each update"
            )
        return next(self._batches)


class _Echoed:
    """The echo of all other variants: an EchoLoader around the batches."""

    def __init__(self, fresh: Iterable[Any], condition: Condition, seed: int, augment: Augment | None) -> None:
        generator = torch.Generator().manual_seed(derive_key(seed, _AUGMENT))
        ahead, behind = augment, None
        if augment is not None and condition.variant == "before":
            ahead, behind = None, lambda batch: augment(batch, generator)
        self._counted = _Counted(fresh, condition.batch_size, ahead, generator)
        unit, rows = ("batch", 1) if condition.variant in ("none", "batch") else ("example", condition.batch_size)
        self._loader = echo(
            self._counted,
            condition.factor,
            unit=unit,  # type: ignore[arg-type]
            buffer=condition.buffer_batches * rows,
            augment=behind,
            updates_per_epoch=_ENDLESS,
            seed=seed,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    @property
    def fresh_examples(self) -> int:
        """Examples admitted so far."""
        num_batches = self._loader.stats().fresh_batches
        return self._counted.rows_of[num_batches - 1] if num_batches else 0

    def stats(self) -> EchoStats:
        """Of the echo."""
        return self._loader.stats()

    def close(self) -> None:
        """End the loader's thread."""
        self._loader.close()


class _Counted:
    """Fresh batches, augmented if the echo stands behind that, and how many examples they have."""

    def __init__(
        self, fresh: Iterable[Any], batch_size: int, augment: Augment | None, generator: torch.Generator
    ) -> None:
        self._fresh = fresh
        # By this name stretto.echo finds what to seed.
        self.base_dataloader = getattr(fresh, "base_dataloader", fresh)
        self.rows_of: list[int] = []
        """Examples in the first batch, the first two, and so on."""
        self._batch_size = batch_size
        self._augment = augment
        self._generator = generator

    def __iter__(self) -> Iterator[Any]:
        for batch in self._fresh:
            rows = _num_rows(batch)
            if not self.rows_of and rows != self._batch_size:
                raise TrainError(
                    f"the first batch has {rows} examples, settings.batch_size is {self._batch_size}: make the "
                    "loader with settings.batch_size and drop_last=True"
                )
            self.rows_of.append(rows + (self.rows_of[-1] if self.rows_of else 0))
            yield batch if self._augment is None else self._augment(batch, self._generator)

    def __getattr__(self, name: str) -> Any:
        if name not in _FORWARDED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._fresh, name)


def _num_rows(batch: Any) -> int:
    for leaf in flatten(batch)[0]:
        if isinstance(shape := getattr(leaf, "shape", None), tuple) and shape:
            return int(shape[0])
    raise TypeError(f"a batch is a {type(batch).__name__} without a tensor: expected its examples to be countable")
