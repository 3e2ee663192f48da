"""One epoch of an `EchoPlan`: torch draws its batches ahead of the training step."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.echo.gap import Kinds
from stretto.echo.workers.consumer import Consumer
from stretto.echo.workers.lanes import Lanes, Uses
from stretto.echo.workers.memory import SingleUse, Use
from stretto.echo.workers.pace import is_due

if TYPE_CHECKING:
    from stretto.echo.workers.batch_plan import EchoPlan

_WHOLE = 20  # bits for the place of an example in a batch that is kept whole


@dataclass(slots=True)
class _Given:
    """What a batch adds to the counters once the training step has been given it."""

    num_uses: int
    num_fresh: int
    num_duplicates: int
    sum_lag: int
    kinds: Kinds


class Epoch(Iterator[Any]):
    """One epoch's batches as torch draws them, which is ahead of the training step."""

    def __init__(self, plan: "EchoPlan") -> None:
        self.epoch = 0
        self.consumer = Consumer()
        self.rank, self.world_size = 0, 1
        self.num_items: int | None = None
        self.lanes: Lanes | None = None
        self.factors: dict[int, float] = {}
        """Under "auto" the factors chosen so far, by the batch from which on they were in force."""
        self.num_given = 0
        """Batches that this process's training step was given."""
        self._plan = plan
        self._num_skipped = 0
        self._drawn: deque[_Given] = deque()
        self._is_exhausted = False

    def __next__(self) -> Any:
        if self.lanes is None:
            self._plan.begin(self)
        self.follow()
        self._time()
        number, uses = self._draw()
        batch = self._batch(uses)
        if number % self.consumer.num_processes == self.consumer.process_index:
            num_fresh = sum(use[3] == 0 for use in batch)
            self._drawn.append(_Given(len(batch), num_fresh, uses.num_duplicates, uses.sum_lag, uses.kinds))
        return SingleUse(batch[0]) if self._plan.settings.is_single else batch

    def skip(self, num_batches: int, factors: Iterable[tuple[int, float]]) -> None:
        """Go on after the first `num_batches` batches of this process."""
        self.factors = dict(factors)
        for _ in range(num_batches * self.consumer.num_processes):
            self._draw()
        self.num_given = self._num_skipped = num_batches

    def follow(self) -> None:
        """Count what the training step was given by now."""
        num_yielded = self.consumer.num_yielded()
        if num_yielded is None:
            return
        while self._drawn and self.num_given < self._num_skipped + num_yielded:
            self._give()

    def give_rest(self) -> None:
        """Count everything that was drawn as given."""
        while self._drawn:
            self._give()

    def _give(self) -> None:
        given = self._drawn.popleft()
        counters = self._plan.counters
        self.num_given += 1
        counters.updates += 1
        counters.uses += given.num_uses
        counters.fresh_items += given.num_fresh
        if self._plan.is_whole:
            counters.fresh_batches += given.num_fresh > 0
        counters.duplicates += given.num_duplicates
        counters.sum_lag += given.sum_lag // self.consumer.num_processes
        self._plan.handed_out(given.kinds)

    @property
    def is_gone(self) -> bool:
        """Whether the iterator is gone after all batches were drawn: then they were given, as far as is known."""
        return self._is_exhausted and not self.consumer.is_own and self.consumer.num_yielded() is None

    @property
    def was_given(self) -> bool:
        """Whether the training step was given all batches. Trainers that know their number ask for no more."""
        return not self._drawn and (self._is_exhausted or self.num_uses_left == 0)

    @property
    def num_uses_left(self) -> int:
        """Uses that were due and that the training step was not given."""
        assert self.lanes is not None
        return sum(given.num_uses for given in self._drawn) + self.lanes.uses_left

    def _time(self) -> None:
        if self.consumer.is_own or self._plan.settings.factor != "auto":
            return
        if (num_returned := self.consumer.num_returned()) is not None:
            self._plan.settings.pace.drew(num_returned)

    def _draw(self) -> tuple[int, Uses]:
        """The next batch of all processes, and its number."""
        lanes, plan = self.lanes, self._plan
        assert lanes is not None
        if self._is_exhausted:
            raise StopIteration
        number, num_processes = lanes.num_batches, self.consumer.num_processes
        if plan.settings.factor == "auto":
            if number in self.factors:
                lanes.factor = self.factors[number]
            elif number % num_processes == 0 and is_due(number // num_processes):
                lanes.factor = self.factors[number] = plan.choose_factor(number // num_processes)
        try:
            return number, next(lanes)
        except StopIteration:
            self._is_exhausted = True
            raise

    def _batch(self, uses: Uses) -> list[Use]:
        uses.positions = uses.positions * self.world_size + self.rank
        batch: list[Use] = [(self.epoch, *row) for row in uses.rows()]
        if not self._plan.is_whole:
            return batch
        ((epoch, position, indices, number, is_last),) = batch
        if hasattr(indices, "tolist"):
            indices = indices.tolist()
        if not isinstance(indices, list | tuple | range):
            raise TypeError(
                f"the batch_sampler yields {indices!r:.60}, a {type(indices).__name__}: expected lists of indices"
            )
        first = position << _WHOLE
        return [(epoch, first + at, index, number, is_last) for at, index in enumerate(indices)]
