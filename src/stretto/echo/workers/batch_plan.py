"""EchoPlan: the batch sampler of an EchoDataLoader, which says which use of which example comes when.

    sampler -> keyed_order (an epoch's order) -> Lanes (uses in lanes) -> batches of `Use` -> EchoedDataset

Life cycle: `iter()` makes an `Epoch`, which begins when its first batch is drawn: only then is it known who draws.
Torch draws ahead of the training step; the position that a state holds is what the step was given.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler

from stretto.echo.factor import Factor
from stretto.echo.gap import EchoGap, Kinds
from stretto.echo.order import (
    check_replayable,
    is_evenly_sharded,
    keyed_order,
    order_seeds,
    sampler_names,
)
from stretto.echo.settings import loader_length, rank_and_world_size
from stretto.echo.stats import Clock, Counters, EchoStats
from stretto.echo.workers.board import Board, Count
from stretto.echo.workers.consumer import EpochNumber, find_consumer, num_processes_of_caller
from stretto.echo.workers.epoch import Epoch
from stretto.echo.workers.lanes import Lanes, LaneSettings, count_batches
from stretto.echo.workers.memory import NUM_PROBED
from stretto.echo.workers.pace import Pace
from stretto.echo.workers.ranks import largest, smallest
from stretto.state import check_settings, to_plain

_VERSION = 1
_READ_AHEAD = 1024  # indices at a time: larger blocks cost less each


@dataclass(slots=True, kw_only=True)
class PlanSettings:
    """What a plan is told by its loader."""

    factor: Factor
    max_factor: int
    """The most uses under "auto"."""
    buffer: int | str | None
    seed: int
    num_workers: int
    count_residents: Callable[[list[Any], int], int]
    """Given the first items of the order and how many are in a draw, how many may stay in a process's workers."""
    pace: Pace
    board: Board
    clock: Clock
    is_single: bool = False
    """Yield single uses, not batches (`batch_size=None`)."""


class EchoPlan(EpochNumber, BatchSampler):
    """The uses of an epoch in batches, each as (epoch, position, index, use, is_last).

    Trainers rebuild it as they do torch's BatchSampler; the EchoDataLoader around it then tells it its settings.
    A state is small: the order of uses follows from the settings, and is made again on load.

    Args:
        sampler: yields the indices of an epoch, or with `is_whole` lists of them: batches that stay whole.
        batch_size: uses of a batch.
        drop_last: leave out what does not make a full batch.
        is_whole: see there.
    """

    def __init__(
        self, sampler: Iterable[Any], batch_size: int = 1, drop_last: bool = False, *, is_whole: bool = False
    ) -> None:
        super().__init__()
        self.sampler = sampler
        self.drop_last = drop_last
        self.is_whole = is_whole
        if not is_whole:  # Lightning would build a plan of another sampler with it; without it says why it cannot
            self.batch_size = batch_size
        self.counters = Counters()
        self._gap = EchoGap()
        self._settings: PlanSettings | None = None
        self._current: Epoch | None = None
        self._resume: dict[str, Any] | None = None
        self._seeds: list[int] | None = None
        self._num_residents: int | None = None
        self._counted: int | None = None  # the same before the ranks have agreed
        self._order: tuple[int, Iterator[Any], int | None] | None = None  # of an epoch that is prepared
        self._factor = 1.0
        self._agrees = False  # whether the ranks draw in step, and so can agree on numbers

    def configure(self, settings: PlanSettings) -> None:
        """Take over the settings of the loader around this plan."""
        self._settings = settings

    def __iter__(self) -> Iterator[Any]:
        return Epoch(self)

    def __len__(self) -> int:
        """Batches of the present epoch, or between epochs of the next. Raises TypeError where that is not known."""
        if self.settings.factor == "auto":
            raise TypeError('factor="auto" has no length: an epoch is one pass over the sampler')
        num_items = loader_length(self.sampler)
        if num_items is None:
            raise TypeError(f"the sampler, a {type(self.sampler).__name__}, has no length")
        num_processes = num_processes_of_caller(self)
        epoch = self.next_epoch
        if self._current is not None:
            epoch, num_items = self._current.epoch, self._current.num_items or num_items
            num_processes = num_processes or self._current.consumer.num_processes
        return count_batches(self.lane_settings(num_processes or 1, self.draw_size), epoch, num_items)

    @property
    def draw_size(self) -> int:
        """Items of a batch: examples, or one batch that stays whole."""
        return 1 if self.is_whole or self.settings.is_single else self.batch_size

    @property
    def settings(self) -> PlanSettings:
        """What the loader said."""
        if self._settings is None:
            raise ValueError("this EchoPlan has no settings: it is made by an EchoDataLoader, or given to one")
        return self._settings

    def lane_settings(self, num_processes: int, num_residents: int) -> LaneSettings:
        """The settings of an epoch's lanes, if batches are dealt out among `num_processes`."""
        settings = self.settings
        is_open = settings.factor == "auto"
        factor = self._factor if is_open else float(settings.factor)
        is_plain = not is_open and factor == 1  # nothing is kept: any worker may read anything
        num_workers = max(1, settings.num_workers)
        return LaneSettings(
            factor=factor,
            max_uses=settings.max_factor if is_open else math.ceil(factor),
            batch_size=self.draw_size,
            num_lanes=1 if is_plain else num_processes * num_workers,
            capacity=max(self.draw_size, num_residents // num_workers),
            drop_last=self.drop_last,
            is_even=num_processes > 1 and not is_plain,
            is_open=is_open,
            seed=settings.seed,
        )

    def begin(self, epoch: "Epoch") -> None:
        """Fill in what the epoch that now begins follows from; for the state too."""
        consumer, resume = find_consumer(self), self._resume
        if resume is not None and resume["num_processes"] != consumer.num_processes:
            raise ValueError(
                f"the state was saved with {resume['num_processes']} processes that share a loader, now there are "
                f"{consumer.num_processes}: load it with as many"
            )
        self.gave()
        self._leave()
        settings = self.settings
        epoch.epoch, epoch.consumer = self.next_epoch, consumer
        self._resume, self.has_begun, self._next_epoch = None, True, epoch.epoch + 1
        order, num_items = self._take_order(epoch.epoch)
        rank, world_size = rank_and_world_size()
        self._agrees = world_size > 1 and not consumer.is_dispatching
        if self._agrees and consumer.num_processes == 1:
            epoch.rank, epoch.world_size = rank, world_size
            least = smallest(math.inf if num_items is None else num_items)
            if num_items is not None:
                self.counters.dropped_items += num_items - int(least)
            num_items = None if least == math.inf else int(least)
        if self._num_residents is None and settings.factor != 1:
            counted, order = self._count(order)
            self._num_residents = int(smallest(counted)) if self._agrees else counted
        lane_settings = self.lane_settings(consumer.num_processes, self._num_residents or 0)
        ahead = 1 if lane_settings.is_open else _READ_AHEAD  # a factor is in force for what is taken after it
        epoch.num_items = num_items
        epoch.lanes = Lanes(lane_settings, epoch.epoch, islice(order, num_items), num_items, read_ahead=ahead)
        self._current = epoch
        if resume is not None:
            epoch.skip(resume["num_batches"], resume["factors"])
        elif settings.factor == "auto":
            epoch.factors[0] = self._factor
        settings.pace.restart(epoch.num_given)

    def prepare(self) -> None:
        """Do of `begin` what can be done before it is known who draws."""
        if self._num_residents is None and self._counted is None and self.settings.factor != 1:
            order, num_items = self._take_order(self.next_epoch)
            self._order = self.next_epoch, self._count(order)[1], num_items

    def _take_order(self, epoch: int) -> tuple[Iterator[Any], int | None]:
        prepared, self._order = self._order, None
        if prepared is not None and prepared[0] == epoch:
            return prepared[1:]
        if self._seeds is None:
            self._seeds = order_seeds(self)
        return keyed_order(self, self.settings.seed, epoch, self._seeds)

    def _count(self, order: Iterator[Any]) -> tuple[int, Iterator[Any]]:
        """How many residents there is room for, and `order`, at the start of which this looks."""
        head = list(islice(order, NUM_PROBED))
        if self._counted is None:
            self._counted = self.settings.count_residents(head, self.draw_size)
        return self._counted, chain(head, order)

    def gave(self) -> None:
        """Count what the training step was given by now."""
        if self._current is not None:
            self._current.follow()
            if self._current.is_gone:
                self.end()

    def handed_out(self, kinds: Kinds) -> None:
        """The training step is given a batch with these kinds of uses."""
        self._gap.handed_out(kinds, is_whole=self.is_whole or self.settings.is_single)

    def observe(self, per_example_losses: Any) -> None:
        """See `EchoDataLoader.observe`; for a loader that a trainer rebuilt."""
        self.gave()
        if self._current is not None and self._current.consumer.is_dispatching:
            raise ValueError(
                "observe: process 0 draws the batches of all processes and cuts them up (Accelerate's "
                "dispatch_batches=True), so whose losses these are is not known: expected dispatch_batches=False"
            )
        self._gap.observe(per_example_losses, may_be_short=self.settings.board.total(Count.SKIPPED) > 0)

    def end(self) -> None:
        """The training step was given every batch of the epoch."""
        if self._current is not None:
            self._current.give_rest()
            self._leave()

    def _leave(self) -> None:
        if self._current is not None:
            self.counters.epochs += self._current.was_given
            self.counters.dropped_uses += self._current.num_uses_left
            self._current = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches that the training step was given, and what the order follows from."""
        self.gave()
        if self._resume is not None:
            return self._resume
        current = self._current
        state = {
            "version": _VERSION,
            "settings": self._settings_for_state(),
            "epoch": self.next_epoch if current is None else current.epoch,
            "is_in_epoch": current is not None,
            "num_batches": 0 if current is None else current.num_given,
            "num_processes": 1 if current is None else current.consumer.num_processes,
            "has_begun": self.has_begun,
            "seeds": self._seeds,
            "num_residents": self._num_residents,
            "factor": self._factor,
            "factors": [] if current is None else list(current.factors.items()),
            "counters": asdict(self.counters),
        }
        plain: dict[str, Any] = to_plain(state)
        return plain

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: the next `iter()` yields the rest of that epoch.

        Raises ValueError if a setting differs, with both values: the number of workers and of processes too, since
        the lanes follow from them; and if the order of the sampler cannot be made again.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION or "num_residents" not in state:
            version = state.get("version") if isinstance(state, dict) else None
            raise ValueError(
                f"the state is a {type(state).__name__} of version {version!r}, expected {_VERSION}: it was not "
                "saved by EchoDataLoader.state_dict, or by another version of stretto"
            )
        current = self._settings_for_state()
        if state["num_processes"] > 1 or is_evenly_sharded(self):  # every rank's state is the same
            del current["rank"]
        check_settings(state["settings"], current)
        if state["has_begun"]:
            check_replayable(self)
        state = to_plain(state)
        self.has_begun = state["has_begun"]
        self._next_epoch = state["epoch"]
        self._seeds = state["seeds"]
        self._num_residents = state["num_residents"]
        self._factor = state["factor"]
        self._current = self._order = None
        self._gap.forget_batch()
        self.settings.board.num_loads += 1
        self._resume = state if state["is_in_epoch"] else None
        self.counters.load(state["counters"])

    def stats(self) -> EchoStats:
        """What has happened so far, in this process and its workers."""
        self.gave()
        counters, clock = self.counters, self.settings.clock
        total = self.settings.board.total
        return EchoStats(
            passes=self._next_epoch if self._current is None else self._current.epoch,
            epochs=counters.epochs,
            updates=counters.updates,
            fresh_batches=counters.fresh_batches if self.is_whole else counters.fresh_items // self.draw_size,
            fresh_items=counters.fresh_items,
            uses=counters.uses,
            duplicates=counters.duplicates,
            dropped_uses=counters.dropped_uses,
            dropped_items=counters.dropped_items,
            resident_items=total(Count.RESIDENTS),
            buffer_bytes=total(Count.RESIDENT_BYTES),
            mean_lag_updates=counters.sum_lag / max(1, counters.uses),
            wait_s=clock.wait_s,
            first_wait_s=clock.first_wait_s,
            draw_s=clock.draw_s,
            step_s=clock.step_s,
            reads=total(Count.READS),
            reread=total(Count.REREADS),
            skipped=total(Count.SKIPPED),
            echo_gap=self._gap.gap,
        )

    def choose_factor(self, num_updates: int) -> float:
        """Under "auto" the factor from here on, agreed among the ranks."""
        factor = self.settings.pace.factor(self._factor, num_updates)
        self._factor = largest(factor) if self._agrees else factor
        return self._factor

    def _settings_for_state(self) -> dict[str, Any]:
        settings = self.settings
        rank, world_size = rank_and_world_size()
        return {
            "factor": settings.factor,
            "max_factor": settings.max_factor,
            "buffer": settings.buffer,
            "seed": settings.seed,
            "batch_size": self.draw_size,
            "drop_last": self.drop_last,
            "num_workers": settings.num_workers,
            "samplers": sampler_names(self),
            "len(sampler)": loader_length(self.sampler),
            "rank": rank,
            "world_size": world_size,
        }
