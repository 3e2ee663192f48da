"""The rows of one process (meter.py) as fetches of training batches and what was done after each."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.profile.iteration import NUM_COLUMNS, Kind
from stretto.profile.pipeline import FloatArray
from stretto.profile.rows import read_rows

_KIND, _LOADER, _ITERATION, _BEGIN, _END, _CPU_BEGIN, _CPU_END, _VALUE = range(NUM_COLUMNS)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Arrays with an entry for each fetch of a training batch, in order of time. Seconds; times by perf_counter."""

    loader: NDArray[np.int64]
    begin: FloatArray
    """When it was asked for; of an iteration's first batch, when `iter(loader)` was called."""
    end: FloatArray
    is_first: NDArray[np.bool_]
    """Of its iteration."""
    over: FloatArray
    """When its iteration was over; infinite if it was not."""
    wait: FloatArray
    """end - begin; on an accelerator the part in which it had nothing to do."""
    wait_cpu: FloatArray
    """CPU seconds of this process between begin and end."""
    step: FloatArray
    """From `end` to the next fetch, without foreign iterations; with what of the wait was hidden."""
    other: FloatArray
    """From `end` to the next fetch: foreign iterations, such as validation, and what lies between epochs."""
    step_cpu: FloatArray
    steps: NDArray[np.int64]
    """Optimizer steps before the next fetch."""
    updates: NDArray[np.int64]
    """Of them, the updates: 2 where a loader that fetches ahead was asked once more before an epoch's last one."""
    queued: FloatArray
    """Batches that were ready when it was asked for; NaN where unknown."""
    factor: FloatArray
    """Realised echoing factor, 1 without."""

    @property
    def num_updates(self) -> int:
        """Spans from one time that a batch was asked for to the next in which an optimizer stepped."""
        return int(self.updates.sum())

    @property
    def total_s(self) -> float:
        """From the first batch asked for to the end of the last update."""
        if not len(self.begin):
            return 0.0
        return float(self.end[-1] + self.shown_step[-1] - self.begin[0])

    @property
    def shown_step(self) -> FloatArray:
        """Seconds after each fetch up to the end of its update."""
        hidden = (self.end - self.begin) - self.wait
        return self.step - hidden

    def of(self, loader: int) -> "Timeline":
        """The fetches of one loader, each with what was done until its next one or until its iteration was over.

        Waits for others are part of that: they would stay if this loader were instant.
        """
        at = np.flatnonzero(self.loader == loader)
        mine = self.take(at)
        if not 0 < len(at) < len(self.loader):
            return mine
        # Of those between which an iteration was over, the later ones belong to other loaders' updates.
        stop = np.minimum(np.append(at[1:], len(self.loader)), np.searchsorted(self.begin, mine.over))
        bounds = np.ravel([at, np.maximum(stop, at + 1)], order="F")
        names = ("step", "other", "step_cpu", "steps", "updates")
        others_wait = np.where(self.loader == loader, 0.0, self.wait)
        values = {name: getattr(self, name) for name in names} | {"step": self.step + others_wait}
        sums = {name: np.add.reduceat(np.append(values[name], 0), bounds)[::2] for name in names}
        return replace(mine, **sums)

    def take(self, which: Any) -> "Timeline":
        """Some of the fetches."""
        return Timeline(*(getattr(self, name)[which] for name in self.__slots__))


def read_timeline(path: Path, training: set[int]) -> Timeline:
    """The timeline in the file of one process; without a fetch if that holds no rows.

    Args:
        path: the rows.
        training: the numbers of the training loaders.
    """
    try:
        _, rows = read_rows(path)
    except (OSError, ValueError):  # not yet written, or cut in its first line
        rows = np.empty((0, NUM_COLUMNS))
    rows = rows[np.argsort(rows[:, _END], kind="stable")]
    kinds = rows[:, _KIND].astype(int)
    iterations = _training_iterations(rows, kinds, training)
    is_ours = np.isin(rows[:, _ITERATION], sorted(iterations))
    fetches = rows[(kinds == Kind.FETCH) & is_ours]
    num = len(fetches)
    begin, end = fetches[:, _BEGIN].copy(), fetches[:, _END]
    is_first = np.zeros(num, bool)
    seen: set[float] = set()
    starts = {row[_ITERATION]: row[_BEGIN] for row in rows[kinds == Kind.ITER]}
    for at, number in enumerate(fetches[:, _ITERATION]):
        if number not in seen:
            seen.add(number)
            is_first[at] = True
            begin[at] = max(starts.get(number, begin[at]), end[at - 1] if at else -np.inf)
    step_times = rows[kinds == Kind.STEP][:, _END]
    ends = rows[((kinds == Kind.END) | (kinds == Kind.LEFT)) & is_ours]
    close = _closings(ends, step_times, begin, end)
    foreign = _foreign(rows, kinds, is_ours, end, close)
    over = dict(zip(ends[::-1, _ITERATION], ends[::-1, _BEGIN], strict=True))
    until = np.append(begin[1:], np.inf)
    steps = np.searchsorted(step_times, until, "right") - np.searchsorted(step_times, end, "right")
    wait = end - begin
    stalls = rows[kinds == Kind.STALL]
    stall_of = dict(zip(stalls[:, _BEGIN], stalls[:, _VALUE], strict=True))
    stall = np.array([stall_of.get(t, -1.0) for t in fetches[:, _BEGIN]])
    seen_by_device = np.where(stall >= 0, np.minimum(stall, wait), wait)
    next_begin = np.append(begin[1:], close[-1:])
    next_cpu = np.append(fetches[1:, _CPU_BEGIN], fetches[-1:, _CPU_END])
    echoes = rows[kinds == Kind.ECHO]
    queued = fetches[:, _VALUE]
    return Timeline(
        loader=fetches[:, _LOADER].astype(np.int64),
        begin=begin,
        end=end,
        is_first=is_first,
        over=np.array([over.get(number, np.inf) for number in fetches[:, _ITERATION]]),
        wait=seen_by_device,
        wait_cpu=np.maximum(0.0, fetches[:, _CPU_END] - fetches[:, _CPU_BEGIN]),
        step=np.maximum(0.0, close - end - foreign) + (wait - seen_by_device),
        other=np.maximum(0.0, next_begin - close) + foreign,
        step_cpu=np.maximum(0.0, next_cpu - fetches[:, _CPU_END]),
        steps=np.maximum(0, steps),
        updates=_updates(step_times, begin, end, ends[ends[:, _KIND] == Kind.END][:, _BEGIN]),
        queued=np.where(queued >= 0, queued, np.nan),
        factor=_factors(echoes, end),
    )


def _training_iterations(rows: FloatArray, kinds: NDArray[np.int64], training: set[int]) -> set[float]:
    """The iterations of training loaders, begun with gradients, in which an optimizer stepped after a fetch."""
    begun = rows[(kinds == Kind.ITER) & (rows[:, _VALUE] > 0)]
    candidates = {row[_ITERATION] for row in begun if int(row[_LOADER]) in training}
    found: set[float] = set()
    fetched: set[float] = set()
    for kind, iteration in zip(kinds, rows[:, _ITERATION], strict=True):
        if kind == Kind.FETCH:
            if iteration in candidates:
                fetched.add(iteration)
        elif kind == Kind.STEP and fetched:
            found |= fetched
            fetched.clear()
    return found


def _updates(steps: FloatArray, begin: FloatArray, end: FloatArray, ends: FloatArray) -> NDArray[np.int64]:
    """For each fetch the updates before the next one; `ends`: when an iteration was asked and had no more."""
    asked = np.sort(np.concatenate([begin, ends]))
    _, first = np.unique(np.searchsorted(asked, steps, side="right"), return_index=True)
    fetch = np.searchsorted(end, steps[first], side="right") - 1
    return np.bincount(fetch[fetch >= 0], minlength=len(end)).astype(np.int64)


def _closings(ends: FloatArray, steps: FloatArray, begin: FloatArray, end: FloatArray) -> FloatArray:
    """When what was done with each batch was over: at the next fetch, or at the end of an iteration.

    Of one that was left with batches still to come the latest step counts as the end: a script may hold its
    iterator for long after it has trained, or be killed.
    """
    ends = ends[np.argsort(ends[:, _BEGIN], kind="stable")]
    which = np.searchsorted(ends[:, _BEGIN], end)
    over = np.append(ends[:, _BEGIN], np.inf)[which]
    has_ended = np.append(ends[:, _KIND] == Kind.END, False)[which]
    following = np.append(begin[1:], np.inf)[: len(end)]
    until = np.minimum(over, following)
    latest = np.append(-np.inf, steps)[np.searchsorted(steps, until, side="right")]
    left = np.where(latest > end, latest, np.where(np.isfinite(until), until, end))
    closed: FloatArray = np.where(has_ended | (following <= over) & np.isfinite(following), until, left)
    return np.maximum(end, closed)


def _foreign(
    rows: FloatArray, kinds: NDArray[np.int64], is_ours: NDArray[np.bool_], end: FloatArray, close: FloatArray
) -> FloatArray:
    """Seconds of other iterations inside each span [end, close]: validation in the middle of an epoch.

    With what follows up to the next fetch, such as a checkpoint, unless an optimizer steps there.
    """
    spans: dict[tuple[int, float], tuple[float, float]] = {}
    about = rows[np.isin(kinds, [Kind.ITER, Kind.FETCH, Kind.END, Kind.LEFT]) & ~is_ours]
    for at, row in zip(np.searchsorted(end, about[:, _BEGIN], side="right") - 1, about, strict=True):
        if at >= 0:
            since, _ = spans.get((at, row[_ITERATION]), (row[_BEGIN], 0))
            spans[at, row[_ITERATION]] = since, min(row[_END], close[at])
    result = np.zeros(len(end))
    reached = -np.inf
    for (at, _), (since, until) in sorted(spans.items(), key=lambda item: item[1]):
        result[at] += max(0.0, until - max(since, reached))
        reached = max(reached, until)
    step_times = rows[kinds == Kind.STEP][:, _END]
    last = {at: until for (at, _), (_, until) in sorted(spans.items(), key=lambda item: item[1][1])}
    for at, until in last.items():
        if np.searchsorted(step_times, until, "right") == np.searchsorted(step_times, close[at], "right"):
            result[at] += close[at] - until
    return result


def _factors(echoes: FloatArray, times: FloatArray) -> FloatArray:
    if not len(echoes):
        return np.ones(len(times))
    return np.interp(times, echoes[:, _END], echoes[:, _VALUE], left=1.0)
