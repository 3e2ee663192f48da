"""The order in which samplers go through a data set: which ones decide it, and how to make it again."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import (
    _InfiniteConstantSampler,
)  # an IterableDataset's stand-in for a sampler

from stretto.echo.keyed import derive_key
from stretto.echo.settings import loader_length

ORDER = 0x0DE4  # the purpose of the stream that keys samplers


def samplers_of(holder: Any) -> list[Sampler[Any]]:
    """The samplers of a loader or of a sampler around others, outermost first, each once."""
    found: dict[int, Any] = {}
    rest = [getattr(holder, name, None) for name in ("batch_sampler", "sampler")]
    while rest:
        sampler = rest.pop(0)
        if sampler is not None and id(sampler) not in found:
            found[id(sampler)] = sampler
            rest += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return list(found.values())


def sampler_names(holder: Any) -> list[str]:
    """The classes of the holder's samplers, outermost first."""
    return [type(sampler).__name__ for sampler in samplers_of(holder)]


def has_generator(sampler: Any) -> bool:
    """Whether a torch generator decides the order; None stands for the global one."""
    return isinstance(getattr(sampler, "generator", sampler), torch.Generator | None)


def is_unsharded(holder: Any) -> bool:
    """Whether the holder surely reads all the data on every rank: its sampler is one of torch's simple ones."""
    simple = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return type(getattr(holder, "sampler", None)) in simple


def is_evenly_sharded(holder: Any) -> bool:
    """Whether the ranks have equal parts of one order, so that one state fits all: Lightning saves rank 0's."""
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers_of(holder))


def check_replayable(holder: Any) -> None:
    """Raise ValueError if the order of the holder's samplers can be neither keyed nor restored."""
    for sampler in samplers_of(holder):
        if not (_adds_no_randomness(sampler) or has_generator(sampler) or hasattr(sampler, "set_epoch")):
            raise ValueError(
                f"the order of {type(sampler).__name__} cannot be made again, so the state cannot be loaded: "
                "expected a sampler with set_epoch(epoch) or with a generator attribute. Add one of them"
            )


def order_seeds(holder: Any) -> list[int]:
    """The seeds that the generators of the holder's samplers were given; 0 for one without a generator."""
    generators = [getattr(sampler, "generator", None) for sampler in samplers_of(holder) if has_generator(sampler)]
    return [0 if generator is None else generator.initial_seed() for generator in generators]


def keyed_order(holder: Any, seed: int, epoch: int, seeds: list[int]) -> tuple[Iterator[Any], int | None]:
    """What `holder.sampler` yields in `epoch`, and how many items that are (None if it has no length).

    A function of `seed`, `epoch` and `seeds` (`order_seeds`): every generator gives way to one keyed by them, and
    `set_epoch(epoch)` is called on what has it. The global random state stays as it is, and so do the generators,
    unless the sampler has no length: then it keeps the keyed one.
    """
    samplers = samplers_of(holder)
    random_ones: list[Any] = [sampler for sampler in samplers if has_generator(sampler)]
    before = [sampler.generator for sampler in random_ones]
    for sampler, own_seed in zip(random_ones, seeds, strict=True):
        sampler.generator = torch.Generator().manual_seed(derive_key(seed, ORDER, epoch, own_seed))
    for sampler in samplers:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
    more: list[Any] = []
    try:
        iterator = iter(holder.sampler)
        order = list(islice(iterator, loader_length(holder.sampler) or 0))
        more = list(islice(iterator, 1))
    finally:
        if not more:
            for sampler, generator in zip(random_ones, before, strict=True):
                sampler.generator = generator
    if more:  # it has no length or goes on beyond it, maybe for ever, and draws as it goes
        return chain(order, more, iterator), None
    return iter(order), len(order)


def _adds_no_randomness(sampler: Any) -> bool:
    """Whether the sampler is sequential or groups the indices of another one; a subclass may do anything."""
    if isinstance(sampler, range | list | tuple | np.ndarray | torch.Tensor):
        return True
    is_known = type(sampler).__module__.partition(".")[0] in ("torch", "torchdata", "accelerate", "stretto")
    return is_known and isinstance(sampler, SequentialSampler | BatchSampler | _InfiniteConstantSampler)
