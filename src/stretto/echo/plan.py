"""Which resident is used when: deterministic, resumable, and without any data in it.

The residents of a buffer live in numbered slots. The plan is a permutation of the slots,

    slots:  [ live, each with uses left | free ]          (slots lent to an admission are in neither part)

with the uses left and the update of admission beside it, by position. Nine bytes a slot up to 255 uses.

    lend(n)          n free slots leave the permutation, to be filled
    admit(slots)     they come back as live residents with their uses
    draw(n)          n distinct live residents at random; those without a use left become free; O(n)
    draw_most_left(n, updates)  the same, but the residents with the most uses left first (to empty the buffer)
    evict(n)         n residents with the fewest uses left become free ("auto" only)

Everything random comes from one counter-based stream, so the state is a few numbers and the live positions:
equal calls give equal draws, whatever the timing. Not thread-safe: one thread, the consumer's, calls it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.echo.keyed import derive_key, uniform

IntArray = NDArray[np.integer[Any]]

SLOT_BYTES = 10  # of the plan up to 255 uses, and of the residents' kinds of use
_DRAWS = 0xD4A3  # the purpose of the stream that picks residents
_BLOCK = 4096  # random numbers made at a time


@dataclass(slots=True)
class Draw:
    """Slots to be used in one update, in order; `freed` of them have no use left."""

    slots: IntArray
    freed: IntArray
    num_duplicates: int = 0
    sum_lag: int = 0
    """Updates between the admission of each drawn item and now, summed over the items."""


class Plan:
    """The residents' slots, uses and order. See the module's docstring.

    Args:
        num_slots: how many slots there are at first.
        limit: how many there can be (`lend` makes more when none is free); None for no limit.
        max_uses: the most uses an item can be admitted with.
        seed: of the stream that picks residents.
    """

    def __init__(self, num_slots: int, max_uses: int, seed: int, *, limit: int | None = None) -> None:
        self.max_uses = max_uses
        self.num_live = 0
        self.num_free = num_slots
        self.num_updates = 0
        self._left = np.zeros(num_slots, dtype=np.min_scalar_type(max_uses))
        self._set_pairs(np.zeros((num_slots, 2), dtype=np.int32))
        self._slots[:] = np.arange(num_slots)
        self._limit = limit
        self._key = derive_key(seed, _DRAWS)
        self._cursor = 0
        self._block = np.empty(0)
        self._block_start = 0

    @property
    def live(self) -> IntArray:
        """The slots of the live residents, in order (a view)."""
        return self._slots[: self.num_live]

    @property
    def uses_left(self) -> int:
        """The uses left in all residents together."""
        return int(self._left[: self.num_live].sum(dtype=np.int64))

    @property
    def most_left(self) -> int:
        """The most uses left in a resident; 0 without residents."""
        return int(self._left[: self.num_live].max(initial=0))

    @property
    def num_unused(self) -> int:
        """Residents admitted with `max_uses` and not used yet."""
        return int(np.count_nonzero(self._left[: self.num_live] == self.max_uses))

    def lend(self, count: int) -> IntArray:
        """Take `count` free slots out of the permutation, to be filled and given to `admit`."""
        if count > self.num_free:
            self._grow(count - self.num_free)
        end = self.num_live + self.num_free
        self.num_free -= count
        return self._slots[end - count : end].copy()

    def give_back(self, slots: IntArray) -> None:
        """Return lent slots as free ones."""
        end = self.num_live + self.num_free
        self._slots[end : end + len(slots)] = slots
        self.num_free += len(slots)

    def admit(self, slots: IntArray, uses: IntArray | int) -> None:
        """Make lent slots live, each with its number of uses (>= 1)."""
        live, new = self.num_live, self.num_live + len(slots)
        moved = self._slots[live : min(new, live + self.num_free)].copy()
        end = new + self.num_free
        self._slots[end - len(moved) : end] = moved
        self._slots[live:new] = slots
        self._left[live:new] = uses
        self._born[live:new] = self.num_updates
        self.num_live = new

    def draw(self, count: int) -> Draw:
        """Use `count` distinct residents, uniformly at random. O(count).

        Each loses one use. `count` is at most `num_live`.
        """
        assert 0 < count <= self.num_live
        if count == 1:
            drawn = self._use_one(int(self._random(1)[0] * self.num_live))
        else:
            drawn = self._use(self._distinct(self.num_live, count))
        self.num_updates += 1
        return drawn

    def draw_most_left(self, count: int, num_updates: int) -> Draw:
        """Use up to `count` items, those with the most uses left first, at random among equals. O(num_live).

        With fewer than `count` residents, those with more uses left than updates are used more than once.

        Args:
            count: items of a full batch.
            num_updates: updates that are left, this one included.
        """
        assert self.num_live
        drawn = [self._use(self._ranked(count, range(self.max_uses, 0, -1), oldest=False))]
        missing = count - len(drawn[0].slots)
        levels = range(self.max_uses, num_updates - 1, -1)
        while missing and len(positions := self._ranked(missing, levels, oldest=False)):
            drawn.append(self._use(positions))
            missing -= len(positions)
        self.num_updates += 1
        return Draw(
            slots=np.concatenate([d.slots for d in drawn]),
            freed=np.concatenate([d.freed for d in drawn]),
            num_duplicates=sum(len(d.slots) for d in drawn[1:]),
            sum_lag=sum(d.sum_lag for d in drawn),
        )

    def evict(self, count: int) -> IntArray | None:
        """Free the `count` residents with the fewest uses left, the oldest among equals. O(num_live).

        Returns their slots, or None and changes nothing when that would take one not used yet.
        """
        positions = self._ranked(count, range(1, self.max_uses), oldest=True)
        return self._free(positions) if len(positions) == count else None

    def clear(self) -> IntArray:
        """Free every resident; returns their slots."""
        return self._free(np.arange(self.num_live))

    def state_dict(self) -> dict[str, Any]:
        """The counters and the live residents by position (which slot holds which does not matter)."""
        live = self.num_live
        return {
            "updates": self.num_updates,
            "cursor": self._cursor,
            "left": torch.from_numpy(self._left[:live].astype(np.int64)),
            "born": torch.from_numpy(self._born[:live].copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> IntArray:
        """Restore an unused plan; returns the slots that hold the live residents, in the saved order."""
        assert self.num_live == 0
        self.num_updates = state["updates"]
        self._cursor = state["cursor"]
        live = len(state["left"])
        slots = self.lend(live)
        if live:
            self.admit(slots, state["left"].numpy())
            self._born[:live] = state["born"].numpy()
        return slots

    def _use(self, positions: IntArray) -> Draw:
        pairs = self._both.take(positions).view(np.int32).reshape(-1, 2)
        slots = pairs[:, 0].copy()
        lag = self.num_updates * len(positions) - int(pairs[:, 1].sum())
        left = self._left.take(positions) - 1
        self._left[positions] = left
        spent = positions[left == 0]
        return Draw(slots, self._free(spent) if len(spent) else spent, sum_lag=lag)

    def _use_one(self, position: int) -> Draw:
        """The same for one position, five times faster with numbers than with arrays of one."""
        slots = self._slots[position : position + 1].copy()
        lag = self.num_updates - self._born.item(position)
        left = self._left.item(position) - 1
        self._left[position] = left
        if left:
            return Draw(slots, slots[:0], sum_lag=lag)
        self.num_live = last = self.num_live - 1
        self.num_free += 1
        for column in (self._slots, self._left, self._born):
            column[position] = column[last]
        self._slots[last] = slots[0]
        return Draw(slots, slots, sum_lag=lag)

    def _free(self, positions: IntArray) -> IntArray:
        """Move live positions to the free part, filling the holes from the end of the live part."""
        freed = self._slots[positions]
        live = self.num_live - len(positions)
        holes: IntArray = positions
        movers: IntArray | slice = slice(live, self.num_live)
        is_hole = positions < live
        if not is_hole.all():
            stays = np.ones(len(positions), dtype=bool)
            stays[positions[~is_hole] - live] = False
            holes, movers = positions[is_hole], live + np.flatnonzero(stays)
        for column in (self._both, self._left):
            column[holes] = column[movers]
        self._slots[live : self.num_live] = freed
        self.num_live = live
        self.num_free += len(positions)
        return freed

    def _ranked(self, count: int, levels: range, *, oldest: bool) -> IntArray:
        """Up to `count` positions, level by level of uses left; within the last level oldest or random."""
        left = self._left[: self.num_live]
        chosen: list[IntArray] = []
        for level in levels:
            if count == 0:
                break
            at = np.flatnonzero(left == level)
            if len(at) > count:
                if oldest:
                    at = at[np.argsort(self._born[at], kind="stable")[:count]]
                else:
                    at = at[self._distinct(len(at), count)]
            chosen.append(at)
            count -= len(at)
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)

    def _distinct(self, n: int, count: int) -> IntArray:
        """`count` distinct numbers below `n`, uniformly at random, in random order. O(count)."""
        if n <= 4 * count:
            return np.argsort(self._random(n), kind="stable")[:count]
        # -n * log(1 - count / n) picks hold `count` distinct ones on average: at most count^2 / 2n + count^3 / 2n^2
        # more than count. Four standard deviations above that, another round is next to never needed.
        more = count * count * (n + count) // (2 * n * n)
        more += 4 * math.isqrt(more) + 8
        while True:
            places = (self._random(count + more) * n).astype(np.int64)
            marks = np.arange(len(places))
            kept = self._both.take(places)
            try:  # Of equal picks the last one finds its own mark where all of them have put theirs.
                self._both[places] = marks
                picks: IntArray = places[self._both.take(places) == marks]
            finally:
                self._both[places] = kept
            if len(picks) >= count:
                return picks[:count]

    def _random(self, count: int) -> NDArray[np.float64]:
        """The next `count` numbers of the stream."""
        start = self._cursor - self._block_start
        if start < 0 or start + count > len(self._block):
            self._block_start, start = self._cursor, 0
            self._block = uniform(self._key, self._cursor, max(count, _BLOCK))
        self._cursor += count
        return self._block[start : start + count]

    def _grow(self, missing: int) -> None:
        old = len(self._slots)
        extra = max(old, missing) if self._limit is None else min(max(old, missing), self._limit - old)
        assert extra >= missing, "more slots lent than there are"
        end = self.num_live + self.num_free
        self._left = np.concatenate([self._left, np.zeros(extra, dtype=self._left.dtype)])
        self._set_pairs(np.concatenate([self._pairs, np.zeros((extra, 2), dtype=np.int32)]))
        self._slots[end : end + extra] = np.arange(old, old + extra)
        self.num_free += extra

    def _set_pairs(self, pairs: NDArray[np.int32]) -> None:
        """Keep slots and births side by side: both are read in a draw, from one cache line."""
        self._pairs = pairs
        self._both = pairs.view(np.int64)[:, 0]
        self._slots: IntArray = pairs[:, 0]
        self._born: IntArray = pairs[:, 1]
