"""The factor of "auto" inside the workers: from service times, measured anew at an interval of updates.

With d seconds for reading an example up to the echo point, a for finishing a use, W workers, B examples a batch
and t seconds for an update, the workers keep up when B * (d / e + a + c) / W <= t, where c is what else they do
(collate, transport), known once they could not keep up. So

    t_up = B * d / W        t_down = t - B * (a + c) / W        R = t_up / t_down

and without workers t_down = t + B * a. The next interval's factor is R, within [1, max_factor]; where R is above,
the smallest factor at which the workers' load is within a tenth of that at max_factor.
"""

import time

from stretto.echo.stats import Clock
from stretto.echo.workers.board import Board, Count

_EARLY = (10, 30)
_INTERVAL = 100
_WAITS = 1.05  # an update's period over the step's time from which on the workers are said not to keep up
_RAISE = 1.5
_ENOUGH = 0.1


def is_due(num_updates: int) -> bool:
    """Whether the factor is to be chosen anew before update `num_updates` of an epoch."""
    return num_updates in _EARLY or (num_updates > 0 and num_updates % _INTERVAL == 0)


class Pace:
    """Measures service times and derives the factor from them.

    Args:
        board: the workers' counts.
        num_workers: 0 for none.
        max_factor: the most uses.
        clock: of the loader whose iterator the training step calls. It may never run, where a trainer has made a
            loader of its own; then steps are timed by `drew`, and where none could be, the factor is raised.
    """

    def __init__(self, board: Board, num_workers: int, max_factor: int, clock: Clock) -> None:
        self._board = board
        self._num_workers = num_workers
        self._max_factor = max_factor
        self._clock = clock
        self._read_s = 0.0
        self._finish_s = 0.0
        self._other_s = 0.0
        self._timed_s, self._num_timed = 0.0, 0
        self._drawn_at: float | None
        self.restart(0)

    def restart(self, num_updates: int) -> None:
        """Measure from update `num_updates` on."""
        self._last, self._last_update = self._counts(), num_updates
        self._drawn_at, self._num_returned = None, -1
        self._done_before = self._board.column(Count.BATCHES)
        self._done_at_draw = self._done_before

    def drew(self, num_returned: int) -> None:
        """Torch draws a batch while it returns another, to a loader that is not ours: before that `num_returned`.

        If that one was ready when the draw before this came, there was no wait since: the time was the step's.
        """
        if num_returned == self._num_returned:  # one of several draws, for as many processes or at the start
            return
        self._num_returned = num_returned
        now, worker = time.perf_counter(), num_returned % max(1, self._num_workers)
        is_ready = self._done_at_draw[worker] - self._done_before[worker] > num_returned // max(
            1, self._num_workers
        )
        if is_ready and self._drawn_at is not None:
            self._timed_s += now - self._drawn_at
            self._num_timed += 1
        self._drawn_at, self._done_at_draw = now, self._board.column(Count.BATCHES)

    def factor(self, present: float, num_updates: int) -> float:
        """The factor from update `num_updates` on, given the present one."""
        num_updates -= self._last_update
        if not num_updates:  # a state was loaded that was saved right before this update
            return present
        last, now = self._last, self._counts()
        self._last, self._last_update = now, self._last_update + num_updates
        reads, read_s, uses, finish_s, step_s, timed_s, num_timed, at = (
            b - a for a, b in zip(last, now, strict=True)
        )
        if reads:
            self._read_s = read_s / reads
        if uses:
            self._finish_s = finish_s / uses
        per_worker = uses / num_updates / max(1, self._num_workers)
        period = at / num_updates
        work = per_worker * (self._read_s / present + self._finish_s)
        step = step_s / num_updates
        if not self._num_workers:
            return self._within(per_worker * self._read_s, (step or period - work) + per_worker * self._finish_s)
        if not step and not num_timed:
            return min(float(self._max_factor), _RAISE * present)
        step = step or timed_s / num_timed
        if period > _WAITS * step:
            self._other_s = max(0.0, (period - work) / per_worker)
        return self._within(per_worker * self._read_s, step - per_worker * (self._finish_s + self._other_s))

    def _within(self, t_up: float, t_down: float) -> float:
        if t_up < self._max_factor * t_down:
            return max(1.0, t_up / t_down)
        # read / e + rest <= 1.1 * (read / max_factor + rest): reading is a small part of the load from there on.
        read, rest = self._read_s, self._finish_s + self._other_s
        return max(1.0, read / ((1 + _ENOUGH) * read / self._max_factor + _ENOUGH * rest)) if read else 1.0

    def _counts(self) -> tuple[float, ...]:
        total = self._board.total
        return (
            total(Count.READS),
            total(Count.READ_NS) / 1e9,
            total(Count.USES),
            total(Count.USE_NS) / 1e9,
            self._clock.step_s,
            self._timed_s,
            self._num_timed,
            time.perf_counter(),
        )
