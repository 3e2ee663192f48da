"""The order of uses of a data set that is echoed inside worker processes: made ahead, without any data in it.

torch gives batch k of a loader to worker k mod W, and Accelerate gives batch k to process k mod P. So the order has
P x W lanes, batch k in lane k mod (P x W), and all uses of an item are in one lane: each worker sees every use
of what it has read.

    the sampler's order:  position 0, 1, 2, ...      each dealt to a lane
    a lane:               resident positions (a Plan) -> batches of distinct positions

Items enter a lane one by one as room arises; while it fills, at most FILL_RATE / e of a batch with each batch. When
the order ends the lanes drain, and they must end in step: a lane that ended early would shift the batches behind it
to other workers. So an item goes to each lane in a round, and those with an extra (fractional) use go round and
round: the lanes' sums of uses never rise from one lane to the next and differ by one use at most, after a last,
partial round by the uses of one item. (With batches smaller than that, lanes may end out of step, and the last
few items be read again.)

Everything follows from the settings, the epoch, the order and, with "auto", the factors that were in force.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.echo.factor import num_uses
from stretto.echo.gap import FIRST, LATER, Kinds
from stretto.echo.keyed import derive_key
from stretto.echo.plan import IntArray, Plan
from stretto.echo.residents import FILL_RATE

_LANE = 0x1A4E  # the purpose of a lane's stream
_MANY = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """What decides the order of uses."""

    factor: float
    """At the start; it can change between batches (`Lanes.factor`)."""
    max_uses: int
    batch_size: int
    num_lanes: int
    capacity: int
    """Residents of a lane, at least `batch_size`."""
    drop_last: bool
    is_even: bool
    """Make every batch full and their number a multiple of `num_lanes`: by more uses of a lane's last items, or
    with `drop_last` or `is_open` by fewer uses."""
    is_open: bool
    """The factor may change, so that the number of uses is not known ahead."""
    seed: int


@dataclass(slots=True)
class Uses:
    """One batch: positions in the epoch's order, what stands there, which use it is (from 0), whether the last."""

    positions: IntArray
    items: NDArray[np.object_]
    uses: IntArray
    is_last: NDArray[np.bool_]
    kinds: Kinds
    """Whether an earlier batch used it."""
    num_duplicates: int
    sum_lag: int
    """Batches of the whole order between an item's entry and this use, summed over the items."""

    def rows(self) -> Iterator[tuple[int, Any, int, bool]]:
        """(position, item, use, whether it is the last) for each."""
        return zip(
            self.positions.tolist(), self.items.tolist(), self.uses.tolist(), self.is_last.tolist(), strict=True
        )


def deal(uses: IntArray, num_lanes: int, num_extra: int) -> tuple[list[IntArray], int]:
    """For each lane the places in `uses` that it gets: one of every `num_lanes` places, a round.

    In a round the places with an extra use come first, for the lanes behind the last that got an extra use;
    `num_extra` is how many extra uses were dealt before. Places left over from whole rounds go to the first lanes.
    Returns the places and the extra uses dealt by now.
    """
    num_rounds = len(uses) // num_lanes
    whole = uses[: num_rounds * num_lanes].reshape(num_rounds, num_lanes)
    extra = whole - whole.min(axis=1, keepdims=True, initial=_MANY)
    order = np.argsort(-extra, axis=1, kind="stable")
    behind = num_extra + np.cumsum(extra.sum(axis=1))
    first = behind - extra.sum(axis=1)
    # order[t, j] goes to lane (first[t] + j) mod num_lanes: lane l gets order[t, (l - first[t]) mod num_lanes].
    turn = (np.arange(num_lanes) - first[:, None]) % num_lanes
    places = np.take_along_axis(order, turn, axis=1) + num_lanes * np.arange(num_rounds)[:, None]
    rest = num_rounds * num_lanes + np.argsort(-uses[num_rounds * num_lanes :], kind="stable")
    lanes = [np.append(places[:, lane], rest[lane : lane + 1]) for lane in range(num_lanes)]
    return lanes, int(behind[-1]) if num_rounds else num_extra


def count_batches(settings: LaneSettings, epoch: int, num_items: int) -> int:
    """Batches of an epoch of `num_items` items at a constant factor."""
    assert not settings.is_open
    totals, _ = _totals(settings, epoch, num_items)
    size = settings.batch_size
    lengths = [total // size if settings.drop_last else -(-total // size) for total in totals]
    if not settings.is_even:
        return sum(lengths)
    return settings.num_lanes * (min(lengths) if settings.drop_last else max(lengths))


class Lanes(Iterator[Uses]):
    """The batches of one epoch, in order.

    Args:
        settings: see there.
        epoch: keys the fractional uses and the lanes' draws.
        order: what to use, such as a data set's indices.
        num_items: how many `order` has; needed for `is_even` at a constant factor.
        read_ahead: take so many items from `order` at a time, and a batch at least.
    """

    def __init__(
        self,
        settings: LaneSettings,
        epoch: int,
        order: Iterator[Any],
        num_items: int | None = None,
        *,
        read_ahead: int = 1,
    ) -> None:
        self.factor = settings.factor
        """In force for the items dealt from now on."""
        self.num_batches = 0
        self.num_dealt = 0
        """Items taken from the order."""
        self._settings = settings
        self._epoch = epoch
        self._order = order
        self._num_extra = 0
        size = max(settings.batch_size, read_ahead)
        self._block = settings.num_lanes * max(1, size // settings.num_lanes)
        self._more: dict[int, int] = {}
        if settings.is_even and not settings.is_open and not settings.drop_last:
            assert num_items is not None
            self._more = _more_uses(settings, epoch, num_items)
        num_slots = settings.capacity
        if num_items is not None:
            num_slots = max(1, min(num_slots, -(-num_items // settings.num_lanes)))
        max_uses = settings.max_uses + max(self._more.values(), default=0)
        seeds = [derive_key(settings.seed, _LANE, epoch, number) for number in range(settings.num_lanes)]
        self._lanes = [_Lane(self, settings, Plan(num_slots, max_uses, seed), num_slots) for seed in seeds]
        self._turn: Iterator[_Lane] = iter(())

    @property
    def uses_left(self) -> int:
        """Uses that are due of what was dealt: once the batches are over, those that were dropped."""
        return sum(lane.uses_left for lane in self._lanes)

    def __next__(self) -> Uses:
        for _ in range(2):
            for lane in self._turn:
                if (uses := lane.next()) is not None:
                    self.num_batches += 1
                    return uses
            if self._settings.is_even and not all(lane.has_full_batch() for lane in self._lanes):
                break
            self._turn = iter(self._lanes)
        raise StopIteration

    def deal_more(self) -> bool:
        """Hand the lanes their part of the next block of the order; False at its end."""
        settings, start = self._settings, self.num_dealt
        taken = list(islice(self._order, self._block))
        if not taken:
            return False
        items = np.fromiter(taken, dtype=object, count=len(taken))
        self.num_dealt += len(taken)
        uses = num_uses(self.factor, settings.seed, self._epoch, start, len(taken))
        lanes, self._num_extra = deal(uses, settings.num_lanes, self._num_extra)
        for lane, places in zip(self._lanes, lanes, strict=True):
            positions = start + places
            if not len(places):
                continue
            due = uses[places]
            if self._more:
                due += [self._more.get(position, 0) for position in positions.tolist()]
            lane.waiting.append((positions, items[places], due))
        return True


def _totals(settings: LaneSettings, epoch: int, num_items: int) -> tuple[list[int], list[IntArray]]:
    """The sum of uses of each lane, and its positions in order."""
    uses = num_uses(settings.factor, settings.seed, epoch, 0, num_items)
    lanes, _ = deal(uses, settings.num_lanes, 0)
    return [int(uses[positions].sum()) for positions in lanes], lanes


def _more_uses(settings: LaneSettings, epoch: int, num_items: int) -> dict[int, int]:
    """By position, the uses to add so that all lanes have equally many full batches: for the last items of each."""
    totals, lanes = _totals(settings, epoch, num_items)
    target = -(-max(totals) // settings.batch_size) * settings.batch_size
    more: dict[int, int] = {}
    for total, positions in zip(totals, lanes, strict=True):
        last = positions[-(target - total) :].tolist() if target > total else []
        if target > total and not last:
            raise ValueError(
                f"{num_items} items for {settings.num_lanes} lanes (processes x workers): expected one for each at "
                "least. Use fewer workers"
            )
        for at in range(target - total):
            position = last[at % len(last)]
            more[position] = more.get(position, 0) + 1
    return more


class _Lane:
    """The residents of one worker, as far as the plan knows them."""

    def __init__(self, lanes: Lanes, settings: LaneSettings, plan: Plan, num_slots: int) -> None:
        self.waiting: list[tuple[IntArray, NDArray[np.object_], IntArray]] = []
        """Positions, items and uses that were dealt to this lane and have not entered."""
        self._lanes = lanes
        self._settings = settings
        self._plan = plan
        self._capacity = num_slots
        self._position = np.zeros(num_slots, dtype=np.int64)  # this and what follows by slot
        self._item = np.empty(num_slots, dtype=object)
        self._used = np.zeros(num_slots, dtype=np.int64)
        self._due = np.zeros(num_slots, dtype=np.int64)
        self._allowed = float(settings.batch_size)
        self._is_filling = True

    @property
    def uses_left(self) -> int:
        """Uses due of residents and of what waits."""
        return self._plan.uses_left + sum(int(due.sum()) for _, _, due in self.waiting)

    def has_full_batch(self) -> bool:
        """Whether there are uses for one more full batch."""
        while self.uses_left < self._settings.batch_size:
            if not self._lanes.deal_more():
                return False
        return True

    def next(self) -> Uses | None:
        """The lane's next batch; None when there is none, or with `drop_last` no full one."""
        plan, size = self._plan, self._settings.batch_size
        self._admit()
        while not self.waiting and self._lanes.deal_more():
            pass
        if self.waiting:
            draw = plan.draw(size)
        else:
            left = plan.uses_left
            num_batches = left // size if self._drops_rest else -(-left // size)
            if not num_batches:
                return None
            # At random as long as no item has to be in every batch that is left: to take those with the most uses
            # left at once would be to read all that has not been used yet, and to hold it beside the rest.
            if plan.num_live >= size and plan.most_left < num_batches:
                draw = plan.draw(size)
            else:
                draw = plan.draw_most_left(size, num_batches)
        slots = draw.slots
        used = self._used[slots]
        kinds = np.where(used == 0, FIRST, LATER).astype(np.int8)
        if draw.num_duplicates:  # count the uses of one item within the batch
            order = np.argsort(slots, kind="stable")
            same = slots[order]
            used[order] += np.arange(len(same)) - np.searchsorted(same, same)
            np.maximum.at(self._used, slots, used + 1)
        else:
            self._used[slots] = used + 1
        items = self._item[slots]
        self._item[draw.freed] = None  # an item may be an example
        return Uses(
            positions=self._position[slots],
            items=items,
            uses=used,
            is_last=used + 1 == self._due[slots],
            kinds=kinds,
            num_duplicates=draw.num_duplicates,
            sum_lag=draw.sum_lag * self._settings.num_lanes,
        )

    @property
    def _drops_rest(self) -> bool:
        return self._settings.drop_last or (self._settings.is_even and self._settings.is_open)

    def _admit(self) -> None:
        """Let fresh items in, one by one, as room and the fill rate allow."""
        plan, size = self._plan, self._settings.batch_size
        count = room = self._capacity - plan.num_live
        if self._is_filling:
            count = max(min(room, int(self._allowed)), size - plan.num_live)
            self._allowed += min(1.0, FILL_RATE / self._lanes.factor) * size - min(count, self._allowed)
            self._is_filling = count < room
        while count > 0 and (self.waiting or self._lanes.deal_more()):
            if not self.waiting:
                continue  # the block had nothing for this lane
            positions, items, due = self.waiting.pop(0)
            if len(positions) > count:
                self.waiting.insert(0, (positions[count:], items[count:], due[count:]))
                positions, items, due = positions[:count], items[:count], due[:count]
            slots = plan.lend(len(positions))
            self._position[slots], self._item[slots] = positions, items
            self._used[slots], self._due[slots] = 0, due
            plan.admit(slots, due)
            count -= len(positions)
