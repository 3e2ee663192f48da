"""A DataLoader and its consumer as a series of events: when each batch is issued, ready and taken.

Every function here takes the seconds that a worker has for each batch, and those of each step, and replays them.
"""

import math
from dataclasses import dataclass
from itertools import cycle, islice

from stretto.echo.buffer import DEFAULT_BATCHES
from stretto.echo.factor import Factor
from stretto.profile.pipeline import FloatArray

_READY = 4  # batches that echo/upstream.py keeps


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What can be changed."""

    num_workers: int
    prefetch_factor: int = 2
    factor: Factor = 1.0
    """Of an echo around the loader, or inside the workers with `echo_after`."""
    echo_after: str | None = None
    """The last stage that runs once for all uses (EchoDataLoader)."""
    max_factor: int = 8
    buffer_batches: float = DEFAULT_BATCHES
    cached_after: str | None = None
    """The last stage whose results are kept in memory for good."""
    saved_step_s: float = 0.0
    """Seconds that a step takes less than now."""


@dataclass(kw_only=True, slots=True)
class Run:
    """What came out, in the steady state."""

    period_s: float
    """Seconds from one update's batch to the next one's."""
    stall_s: float
    """The part of it that was waited for."""
    factor: float
    step_stretch: float = 1.0
    factor_around: float = 1.0
    """Updates to a batch of the loader's."""


def run_plain(settings: Settings, service: FloatArray, step: FloatArray, receive_s: float = 0.0) -> Run:
    """The loader by itself. To receive a batch from workers takes the loop `receive_s`, ready or not."""
    num_workers = settings.num_workers
    if not num_workers:
        stall, step_s = float(service.mean()), float(step.mean())
        return Run(period_s=stall + step_s, stall_s=stall, factor=1.0)
    num_outstanding = num_workers * max(1, settings.prefetch_factor)
    services: list[float] = service.tolist()
    steps: list[float] = step.tolist()
    num_measured = len(services)
    num_warm = min(num_measured, max(num_measured // 2, 2 * num_outstanding))
    finished = [0.0] * num_workers
    taken = [0.0] * num_outstanding
    now = stall = begin = 0.0
    for k in range(num_warm + num_measured):
        if k == num_warm:
            begin, stall = now, 0.0
        worker, place = k % num_workers, k % num_outstanding
        issued, free = taken[place], finished[worker]
        ready = (issued if issued > free else free) + services[k % num_measured]
        finished[worker] = ready
        if ready > now:
            stall += ready - now
            now = ready
        now += receive_s
        stall += receive_s
        taken[place] = now
        now += steps[k % len(steps)]
    return Run(period_s=(now - begin) / num_measured, stall_s=stall / num_measured, factor=1.0)


def run_echoed(settings: Settings, service: FloatArray, step: FloatArray, receive_s: float = 0.0) -> Run:
    """An EchoLoader around the loader: its thread fetches, so that there is overlap even without workers."""
    num_workers = max(1, settings.num_workers)
    num_outstanding = num_workers * max(1, settings.prefetch_factor)
    services: list[float] = service.tolist()
    steps: list[float] = step.tolist()
    is_auto = isinstance(settings.factor, str)
    most_uses = settings.max_factor if isinstance(settings.factor, str) else settings.factor
    room = max(1.0, settings.buffer_batches) * most_uses
    finished = [0.0] * num_workers
    taken = [0.0] * num_outstanding
    admitted = [0.0] * _READY
    last_taken = 0.0

    def fetch(k: int) -> float:
        nonlocal last_taken
        worker, place = k % num_workers, k % num_outstanding
        room_at = admitted[k % _READY]
        if settings.num_workers:
            ready = max(taken[place], finished[worker]) + services[k % len(services)]
            last_taken = max(ready, last_taken, room_at) + receive_s
        else:
            ready = last_taken = max(room_at, last_taken) + services[k % len(services)]
        finished[worker] = ready
        taken[place] = last_taken
        return last_taken

    num_measured = len(services)
    num_warm = min(num_measured, max(num_measured // 2, 2 * num_outstanding + 2 * _READY))
    num_fresh = num_updates = begin_updates = 0
    begin = now = stall = uses_left = 0.0
    next_ready = fetch(0)
    last = num_warm + num_measured + 1
    for step_s in islice(cycle(steps), math.ceil(last * most_uses) + 1):
        is_needed = uses_left < 1 - 1e-9
        if is_needed or (is_auto and next_ready <= now):
            if next_ready > now:
                stall += next_ready - now
                now = next_ready
            admitted[num_fresh % _READY] = now
            num_fresh += 1
            uses_left = min(uses_left + most_uses, room)
            next_ready = fetch(num_fresh)
            if num_fresh == last:
                break
        if not begin_updates and num_fresh > num_warm:
            begin, stall, begin_updates = now, 0.0, num_updates
        now += step_s
        uses_left -= 1
        num_updates += 1
    count = max(1, num_updates - begin_updates)
    factor = count / num_measured if is_auto else most_uses
    factor = max(1.0, min(factor, float(most_uses)))
    return Run(period_s=(now - begin) / count, stall_s=stall / count, factor=factor, factor_around=factor)
