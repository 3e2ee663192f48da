"""The residents: a plan and a buffer kept in step, and the rules by which fresh batches are admitted.

A number as factor admits by counts alone. While the buffer fills, at most `FILL_RATE / e` batches an update
(never more than one); once it is full, a batch whenever a whole one fits. "auto" admits what is ready, one
batch an update, and makes room by evicting the residents with the most uses.

FILL_RATE is measured (benchmarks/fill_rate.py, R = e = 6; 4,561 updates' time to a target without echoing):
with a buffer of 64 batches 948 at 1.5 / e, 1,023 at 2 / e, 1,021 at one batch an update; with 16 batches 902, 866
and 881, no clear difference. At 1 / e the buffer would never grow beyond a batch.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stretto.echo.buffer import Buffer, Prepared
from stretto.echo.factor import num_uses
from stretto.echo.gap import FIRST, LATER, UNKNOWN, Kinds
from stretto.echo.plan import Draw, IntArray, Plan

FILL_RATE = 1.5
_FIRST_SLOTS = 1 << 16


@dataclass(slots=True)
class Drawn:
    """One update's batch, and the draw that it was made by."""

    batch: Any
    draw: Draw
    kinds: Kinds
    """Of each row: whether an earlier update used it."""


class Residents:
    """Examples (or batches) that can be drawn.

    Args:
        buffer: where they are.
        factor: uses of an item; None for "auto".
        max_factor: the most uses of an item.
        seed: of the plan and of fractional uses.
    """

    def __init__(self, buffer: Buffer, factor: float | None, max_factor: int, seed: int) -> None:
        self.buffer = buffer
        self.batch_size = buffer.batch_size
        self._factor = factor
        self._seed = seed
        max_uses = max_factor if factor is None else math.ceil(factor)
        limit = buffer.num_slots if buffer.is_fixed else None
        self._plan = Plan(min(buffer.num_slots, _FIRST_SLOTS), max_uses, seed, limit=limit)
        self._kinds = np.zeros(0, dtype=np.int8)
        """Of the next use, by slot."""
        self._is_filling = True
        self._fill_rate = min(1.0, FILL_RATE / factor) if factor else 1.0
        self._fill_credit = 1.0
        self._usual_size = 0

    @property
    def num_live(self) -> int:
        """Items that can be drawn."""
        return self._plan.num_live

    @property
    def due_uses(self) -> int:
        """Uses still due: all that are left with a number as factor, one for each unused item under "auto"."""
        return self._plan.num_unused if self._factor is None else self._plan.uses_left

    @property
    def is_short(self) -> bool:
        """Whether there are fewer than a batch of distinct items."""
        return self._plan.num_live < self.batch_size

    def asks(self) -> bool:
        """Whether this update needs one more fresh batch first (number as factor)."""
        if self.is_short:
            return True
        if self.buffer.excess(self._usual_size, self.num_live):
            self._is_filling = False
            return False
        return not self._is_filling or self._fill_credit >= 1

    def fits(self, prepared: Prepared, *, evict: bool) -> bool:
        """Whether the batch can be admitted now, if need be after evicting residents that have been used."""
        if self.is_short:
            if self.buffer.is_fixed and self.num_live + prepared.num_items > self.buffer.num_slots:
                raise ValueError(
                    f"a batch of {prepared.num_items} examples arrived, the first one had {self.batch_size}: the "
                    f"buffer has room for {self.buffer.num_slots - self.num_live} more. Ask for a larger buffer"
                )
            return True
        while excess := self.buffer.excess(prepared.size, self.num_live):
            freed = self._plan.evict(excess) if evict else None
            if freed is None:
                return False
            self.buffer.free(freed)
        return True

    def admit(self, prepared: Prepared, slots: IntArray | None, pass_index: int, start: int) -> None:
        """Make a fresh batch resident; `slots` if it was copied there already.

        `start` is the index of its first item in the pass.
        """
        count = prepared.num_items
        if slots is None:
            slots = self._plan.lend(count)
            try:
                self.buffer.put(slots, prepared)
            except BaseException:
                self._plan.give_back(slots)
                raise
        elif len(slots) > count:
            self._plan.give_back(slots[count:])
            slots = slots[:count]
        uses: IntArray | int = self._plan.max_uses
        if self._factor is not None and self._factor < uses:  # a fraction of the items has one use less
            uses = num_uses(self._factor, self._seed, pass_index, start, count)
        self._plan.admit(slots, uses)
        self._mark(slots, FIRST)
        self._usual_size = self._usual_size or prepared.size
        self._fill_credit = max(0.0, self._fill_credit - 1)

    def lend(self) -> IntArray | None:
        """Free slots for another thread to copy the next batch into, if there are enough for one."""
        if self.buffer.is_staged and self.buffer.num_slots - self.num_live >= self.batch_size:
            return self._plan.lend(self.batch_size)
        return None

    def give_back(self, slots: IntArray) -> None:
        """Return lent slots."""
        self._plan.give_back(slots)

    def draw(self) -> Drawn:
        """A batch of distinct residents at random."""
        return self._take(self._plan.draw(self.batch_size))

    def drain(self, *, drop_last: bool) -> Drawn | None:
        """A batch that empties the buffer evenly: the residents with the most uses left first.

        A resident is in it twice only if it has more uses left than there will be updates. Returns None when
        no use is due, or with `drop_last` fewer than a batch (that does not apply to "auto").
        """
        due, size = self.due_uses, self.batch_size
        if self._factor is None:
            return self._take(self._plan.draw_most_left(min(size, self.num_live), 1)) if due else None
        num_updates = due // size if drop_last else math.ceil(due / size)
        return self._take(self._plan.draw_most_left(size, num_updates)) if num_updates else None

    def clear(self) -> int:
        """Forget every resident; returns the uses that were due."""
        due = self.due_uses
        self.buffer.free(self._plan.clear())
        self._refill()
        return due

    def state_dict(self, *, with_buffer: bool) -> dict[str, Any]:
        """Uses, order and counters, with the items themselves if asked for."""
        return {
            "batch_size": self.batch_size,
            "plan": self._plan.state_dict(),
            "kinds": torch.from_numpy(self._kinds[self._plan.live]),
            "is_filling": self._is_filling,
            "fill_credit": self._fill_credit,
            "usual_size": self._usual_size,
            "buffer": self.buffer.save(self._plan.live) if with_buffer else None,
        }

    def load_state_dict(self, state: dict[str, Any], example: Any) -> int:
        """Restore unused residents; returns the uses lost because the state holds no items.

        `example` is one of the loader's batches.
        """
        slots = self._plan.load_state_dict(state["plan"])
        self._is_filling = state["is_filling"]
        self._fill_credit = state["fill_credit"]
        self._usual_size = state["usual_size"]
        if state["buffer"] is None:
            due = self.due_uses
            self._plan.clear()
            self._refill()
            return due
        self.buffer.restore(slots, state["buffer"], example)
        self._mark(slots, state["kinds"].numpy() if "kinds" in state else UNKNOWN)
        return 0

    def _refill(self) -> None:
        self._is_filling, self._fill_credit = True, 1.0

    def _mark(self, slots: IntArray, kinds: Kinds | int) -> None:
        if missing := max(0, int(slots.max(initial=-1)) + 1 - len(self._kinds)):
            more = max(missing, len(self._kinds))
            self._kinds = np.concatenate([self._kinds, np.zeros(more, dtype=np.int8)])
        self._kinds[slots] = kinds

    def _take(self, draw: Draw) -> Drawn:
        batch = self.buffer.take(draw.slots)
        kinds = self._kinds[draw.slots]
        self._kinds[draw.slots] = LATER
        self.buffer.free(draw.freed)
        if self._is_filling:
            self._fill_credit += self._fill_rate
        return Drawn(batch, draw, kinds)
