"""The endless sequence of passes over a loader, which can be entered at any batch.

Each pass has a number, set on whatever has `set_epoch` right before the loader is iterated. A random sampler
without a generator of its own gets one keyed by (seed, pass); one with a generator has its state recorded at
the start of the pass. So a pass can be made again to any position, and nothing here draws from the global
random state.
"""

import copy
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from stretto.echo.keyed import derive_key
from stretto.echo.order import ORDER, has_generator, samplers_of
from stretto.echo.settings import loader_length

_MAX_OPENINGS = 3
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Position:
    """A place in the sequence of passes: before batch `num_batches` of pass `pass_index`."""

    pass_index: int
    num_batches: int = 0
    loader_state: Any = None
    """The loader's own state there, if it has any and `num_batches` > 0."""
    start_states: list[Any] | None = None
    """The states of the samplers' own generators at the start of the pass; None: as they are."""


@dataclass(slots=True)
class PassEnd:
    """What comes after the last batch of a pass: the position of the next one."""

    next_start: Position


class Passes:
    """Batches of pass after pass of `loader`, with the loader's own state after each.

    Args:
        loader: any re-iterable of batches.
        seed: keys the order of samplers that have no generator.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._iterator: Iterator[Any] | None = None
        self._position = Position(0)
        self._num_batches = 0
        self._keyed: dict[int, torch.Generator] = {}
        self._before: dict[int, torch.Generator | None] = {}  # what samplers had in place of the keyed ones
        self._has_state = all(hasattr(loader, name) for name in ("state_dict", "load_state_dict"))
        self._warn_of_global_randomness = getattr(loader, "num_workers", None) == 0

    def seek(self, position: Position) -> None:
        """Continue at `position`; whatever was open is dropped."""
        self._iterator = None
        self._position = position

    def take_over(self, iterator: Iterator[Any], position: Position) -> None:
        """Continue with an iterator that was begun outside, for pass `position.pass_index`, and has come so far."""
        self._iterator, self._position, self._num_batches = iterator, position, position.num_batches
        self._warn_of_global_randomness = False  # whoever wrote the loop does not know of this thread

    def give_up(self) -> tuple[Iterator[Any] | None, Position]:
        """The open iterator, for another one to take over, and how far it has come."""
        return self._iterator, Position(self._position.pass_index, self._num_batches)

    def next(self) -> tuple[Any, Any] | PassEnd:
        """The next batch with the loader's state after it (None if it has none), or the end of the pass.

        Raises what the loader raises, and ValueError if a pass is empty or ends before the position sought.
        """
        if self._iterator is None:
            return self._open()
        return self._fetch(self._iterator)

    def start_states(self) -> list[Any]:
        """The present states of the samplers' own generators."""
        return [sampler.generator.get_state() for sampler in self._random_samplers() if self._is_own(sampler)]

    def close(self) -> None:
        """Drop what is open and take back the generators given to samplers."""
        self._iterator = None
        for sampler in self._random_samplers():
            if id(sampler) in self._keyed:
                sampler.generator = self._before.pop(id(sampler))
        self._keyed = {}

    def _open(self) -> tuple[Any, Any] | PassEnd:
        position = self._position
        for _ in range(_MAX_OPENINGS):
            self._position = position
            epochs = self._enter_pass(position)
            if position.loader_state is not None:
                self._loader.load_state_dict(position.loader_state)
            self._iterator = iterator = iter(self._loader)
            if position.loader_state is None:
                self._skip(iterator, position)
            self._num_batches = position.num_batches
            first = self._fetch(iterator)
            # A sampler reads its epoch when the first index is drawn: a trainer's set_epoch may have come between.
            if all(getattr(sampler, "epoch", None) == epoch for sampler, epoch in epochs):
                return first
        raise RuntimeError(
            f"the epoch of a sampler kept changing while pass {position.pass_index} began: set_epoch is called in "
            "a loop somewhere"
        )

    def _enter_pass(self, position: Position) -> list[tuple[Any, Any]]:
        """Set the pass number and the generators. Returns the samplers and the epoch each then has."""
        key = derive_key(self._seed, ORDER, position.pass_index)
        states = list(position.start_states or [])
        for sampler in self._random_samplers():
            if self._is_own(sampler):
                if states:
                    sampler.generator.set_state(states.pop(0))
                continue
            if id(sampler) not in self._keyed:
                self._keyed[id(sampler)] = torch.Generator()
                self._before[id(sampler)] = sampler.generator
            sampler.generator = self._keyed[id(sampler)].manual_seed(key)
        samplers = samplers_of(self._loader)
        holders = {id(h): h for h in (self._loader, *samplers, getattr(self._loader, "dataset", None))}
        for holder in holders.values():
            if callable(set_epoch := getattr(holder, "set_epoch", None)):
                set_epoch(position.pass_index)
        return [(sampler, getattr(sampler, "epoch", None)) for sampler in samplers]

    def _skip(self, iterator: Iterator[Any], position: Position) -> None:
        for at in range(position.num_batches):
            if next(iterator, self) is self:
                raise ValueError(
                    f"pass {position.pass_index} of the loader ended after {at} batches, but the state was saved "
                    f"after {position.num_batches}: the data set has changed, or it cannot be iterated twice"
                )

    def _fetch(self, iterator: Iterator[Any]) -> tuple[Any, Any] | PassEnd:
        before = _global_random_state() if self._warn_of_global_randomness else None
        try:
            batch = next(iterator)
        except StopIteration:
            pass_index = self._position.pass_index
            if self._num_batches == 0:
                raise ValueError(
                    f"the loader is empty: pass {pass_index} had no batch. Expected at least one (a data set "
                    "smaller than one batch with drop_last=True? an iterator that is used up?)"
                ) from None
            length = loader_length(self._loader)
            if length is not None and self._num_batches < length:
                _LOG.warning("pass %d ended after %d of %d batches", pass_index, self._num_batches, length)
            self.seek(Position(pass_index + 1, start_states=self.start_states()))
            return PassEnd(self._position)
        self._warn_if_changed(before)
        self._num_batches += 1
        return batch, self._read_state()

    def _read_state(self) -> Any:
        """A copy of the loader's own state, which may be one that it changes in place; None if it has none."""
        if not self._has_state:
            return None
        try:
            return copy.deepcopy(self._loader.state_dict())
        except AttributeError:
            # Accelerate's loaders have the method, but a state only around torchdata's StatefulDataLoader.
            if not isinstance(getattr(self._loader, "base_dataloader", None), DataLoader):
                raise
            self._has_state = False
            return None

    def _warn_if_changed(self, before: Any) -> None:
        """Once, if fetching the first batch moved the global random state."""
        if before is not None:
            self._warn_of_global_randomness = False
            if before != _global_random_state():
                warnings.warn(
                    "the data set or its sampler draws from the global random state, with num_workers=0 in "
                    "stretto's background thread: neither its numbers nor yours are then reproducible. Use "
                    "num_workers >= 1, or a generator of the data set's own",
                    stacklevel=2,
                )

    def _random_samplers(self) -> list[Any]:
        """Everything whose `generator` decides an order; the DataLoader itself seeds its workers from one."""
        inner = getattr(self._loader, "base_dataloader", None)  # Accelerate's loaders iterate another one
        loaders = [loader for loader in (self._loader, inner) if isinstance(loader, DataLoader)]
        return [holder for holder in (*loaders, *samplers_of(self._loader)) if has_generator(holder)]

    def _is_own(self, sampler: Any) -> bool:
        """Whether the sampler has a generator of the user's."""
        if sampler.generator is None or id(sampler) in self._keyed:
            return False
        # torchdata's sampler makes one, seeded at random, where the user gave none.
        is_made = type(sampler).__module__.startswith("torchdata.") and sampler is not self._loader
        return not (
            is_made and (id(self._loader) in self._keyed or getattr(self._loader, "generator", None) is None)
        )


def _global_random_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), state["key"].tobytes(), state["pos"], random.getstate()
