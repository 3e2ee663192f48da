"""The loader of a run that echoes inside worker processes: the user's DataLoader made into an EchoDataLoader.

    data set -> collate_fn, a batch of one example -> kept -> augment -> the batches of one joined -> step

So the user's functions of a batch serve for single examples, and a data set whose `__getitems__` makes a batch
serves as well.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stretto.echo.dataloader import EchoDataLoader
from stretto.echo.leaf import why_not_rows
from stretto.echo.stats import EchoStats
from stretto.study.conditions import Condition
from stretto.study.study import TrainError
from stretto.tree import flatten

Augment = Callable[[Any, torch.Generator], Any]
"""augment(batch, generator) -> batch: a new batch, its random numbers from the generator."""


class InWorkers:
    """Batches without end: an EchoDataLoader's epochs, one after the other.

    Raises TrainError if `fresh` is no DataLoader that can be echoed in its workers.
    """

    def __init__(self, fresh: Any, condition: Condition, seed: int, augment: Augment | None) -> None:
        _check(fresh, condition)
        try:
            self._loader: EchoDataLoader | None = EchoDataLoader(
                _BatchesOfOne(fresh.dataset, fresh.collate_fn),
                fresh.batch_size,
                sampler=fresh.sampler,
                num_workers=fresh.num_workers,
                collate_fn=_join,
                pin_memory=fresh.pin_memory,
                drop_last=fresh.drop_last,
                timeout=fresh.timeout,
                worker_init_fn=fresh.worker_init_fn,
                multiprocessing_context=fresh.multiprocessing_context,
                generator=fresh.generator,
                prefetch_factor=fresh.prefetch_factor,
                persistent_workers=fresh.persistent_workers,
                pin_memory_device=fresh.pin_memory_device,
                in_order=fresh.in_order,
                factor=condition.factor,
                buffer=condition.buffer_batches * condition.batch_size,
                augment=None if augment is None else _AugmentOne(augment),
                seed=seed,
            )
        except (TypeError, ValueError) as error:
            raise TrainError(f'variant "workers" cannot be made of this DataLoader: {error}') from error
        self._stats = self._loader.stats()
        self._starting_s = 0.0
        self._is_closed = False
        self._batches = self._epochs(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def _epochs(self, loader: EchoDataLoader) -> Generator[Any, None, None]:
        while True:
            began_s = time.perf_counter()
            batches = iter(loader)
            self._starting_s += time.perf_counter() - began_s
            for batch in batches:
                if self._is_closed:
                    return
                yield batch

    @property
    def fresh_examples(self) -> int:
        """Examples read for the updates so far: those whose first use an update was given."""
        return self.stats().fresh_items

    def stats(self) -> EchoStats:
        """Of the echo; the start of workers counts as waiting."""
        if self._loader is not None:
            self._stats = self._loader.stats()
        return replace(self._stats, wait_s=self._stats.wait_s + self._starting_s)

    def close(self) -> None:
        """End the workers."""
        self.stats()
        self._is_closed = True
        with contextlib.suppress(ValueError):  # a thread of the training's own is in next(): it ends there
            self._batches.close()
        self._loader = None


class _BatchesOfOne(Dataset[Any]):
    """A data set's examples, each as the batch of one that its loader makes of it."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        # As torch fetches a batch.
        if getattr(self._dataset, "__getitems__", None):
            return self._collate_fn(self._dataset.__getitems__([index]))
        return self._collate_fn([self._dataset[index]])

    def __getattr__(self, name: str) -> Any:
        """The data set's own attribute: a worker_init_fn may look for it, or set it."""
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_dataset", "_collate_fn"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)


class _AugmentOne:
    """The augmentation of a use: its random numbers come from the generator that is seeded for each."""

    def __init__(self, augment: Augment) -> None:
        self._augment = augment

    def __call__(self, batch: Any) -> Any:
        return self._augment(batch, torch.default_generator)


def _join(ones: Sequence[Any]) -> Any:
    """The rows of all batches in one. Raises TypeError for what has no rows or differs in structure."""
    (_, structure), *_ = taken = [flatten(one) for one in ones]
    for _, other in taken:
        if not other.is_like(structure):
            raise TypeError(
                f"the batches of single examples differ: one has {structure.paths}, another {other.paths}. Make "
                "them alike"
            )
    joined = []
    for path, leaves in zip(structure.paths, zip(*(leaves for leaves, _ in taken), strict=True), strict=True):
        name = f"leaf {path}" if path else "itself"
        if reason := why_not_rows(leaves[0]):
            raise TypeError(
                f"a batch's {name} {reason}: expected tensors or arrays whose first dimension counts the examples"
            )
        shapes = {tuple(leaf.shape) for leaf in leaves}
        if len(shapes) > 1 or next(iter(shapes))[0] != 1:
            raise TypeError(
                f"in batches of a single example {name} has the shapes {', '.join(map(str, sorted(shapes)))}: "
                "expected one row for the example, and rows of one shape. What joins the examples of a batch in "
                'another way (padding, graphs, offsets) cannot be echoed by the variant "workers"'
            )
        joined.append(torch.cat(leaves) if isinstance(leaves[0], torch.Tensor) else np.concatenate(leaves))
    return structure.build(joined)


def _check(fresh: Any, condition: Condition) -> None:
    expected = (
        "expected a torch DataLoader over a map-style data set, made with settings.batch_size. Leave the variant "
        "out, or make one"
    )
    if not isinstance(fresh, DataLoader):
        raise TrainError(f'variant "workers" got a {type(fresh).__name__}: {expected}')
    if isinstance(fresh, EchoDataLoader) or type(fresh).__iter__ is not DataLoader.__iter__:
        raise TrainError(
            f'variant "workers" got a {type(fresh).__name__}, which yields batches in a way of its own: expected '
            "torch's own DataLoader"
        )
    if isinstance(fresh.dataset, IterableDataset):
        raise TrainError(
            f'variant "workers" got a DataLoader over a {type(fresh.dataset).__name__}, which is iterable: '
            f"{expected}"
        )
    if fresh.batch_size is None:
        raise TrainError(
            f'variant "workers" got a DataLoader without a batch_size, over batches that are made elsewhere: '
            f"{expected}"
        )
    if fresh.batch_size != condition.batch_size:
        raise TrainError(
            f"the DataLoader has batch_size={fresh.batch_size}, settings.batch_size is {condition.batch_size}: "
            "make it with settings.batch_size and drop_last=True"
        )
    num_examples = len(fresh.sampler) if isinstance(fresh.sampler, Sized) else fresh.batch_size
    if num_examples < fresh.batch_size:
        raise TrainError(
            f"a pass over the data set has {num_examples} examples, no batch of {fresh.batch_size}: expected one "
            "or more. Give more data, or a smaller batch size"
        )
