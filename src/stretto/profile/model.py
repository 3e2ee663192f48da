"""A DataLoader and its consumer with other settings, by simulation over what was measured.

    worker k mod W:  max(issued, free) + service -> ready, in order -> consumer: max(asked, ready) + receive + step

    issued   with W workers and prefetch_factor P, batch k is issued when batch k - W P is taken
    service  computing (times the stretch, below) + waiting + a constant that makes the present come out right
    echo     around the loader: a thread keeps 4 batches ready (echo/upstream.py), an update waits as the factor's
             rule says. Inside the workers: the stages up to the echo point run once in e uses

Batches are replayed in the order in which they came, so that bursts and drift stay; steps in blocks in a random
order, since which step met which batch is chance. Computing stretches where more processes want a core than there
are: one that computes meets the others with the probability that they do, and all share the cores alike,
s = E[max(1, n / cores)]. The simulation and s are brought to agree by iteration, since a slower pipeline computes
less often. What is predicted is the steady state: full buffers, no epoch's start.

With constant times t_up and t_down this is the time model of arXiv 1907.05550, section 2: max(t_up, e t_down) for
e updates, t_up + e t_down without overlap.
"""

import math
from dataclasses import dataclass

import numpy as np

from stretto.echo.factor import default_max_factor
from stretto.profile.pipeline import FloatArray, Pipeline, Stage
from stretto.profile.simulate import Run, Settings, run_echoed, run_plain

_MAX_SAMPLES = 1024
_MIN_BATCHES = 512
_BLOCK = 32
_ROUNDS = 6  # of the iteration for the stretch
_RECEIVE_S = 1e-3  # of a batch from a worker, where there are none to measure it by: an assumption
_SPIKE = 3.0  # times the median, from which on a time is one example's, not the batch's


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A steady state."""

    updates_per_s: float
    fresh_per_s: float
    """Fresh examples a second."""
    stall_share: float
    """Of the time, in which the update waits for a batch."""
    factor: float
    """Uses of a fresh batch, as they came out."""
    speedup: float
    """Updates a second over the present."""


def predict(pipeline: Pipeline, settings: Settings) -> Prediction:
    """The pipeline with other settings: the measured rate times the ratio of two simulations."""
    return Model(pipeline).predict(settings)


class Model:
    """A pipeline's measurements, and the constant a batch that makes the simulation of the present right.

    Args:
        pipeline: what was measured; where no batch's service was seen it is inferred from the waits.
        seed: of the order in which steps are replayed, and of what each batch reads of an echo inside workers.
    """

    def __init__(self, pipeline: Pipeline, seed: int = 0) -> None:
        self.pipeline = pipeline
        self.present = present_settings(pipeline)
        cpu, wait = split_service(pipeline)
        length = min(len(cpu), _MAX_SAMPLES)
        self._num_batches = length * math.ceil(_MIN_BATCHES / length)
        rng = np.random.default_rng(seed)
        order = np.arange(self._num_batches) % length
        self._cpu, self._wait = cpu[-length:][order], wait[-length:][order]
        steps = np.maximum(pipeline.step_s[-_MAX_SAMPLES:], 0.0) if len(pipeline.step_s) else np.zeros(1)
        self._step = steps[_blocks(len(steps), max(self._num_batches, len(steps)), rng)]
        self._step_cpu_s = max(0.0, pipeline.step_cpu_s)
        self._seed = seed
        self._receive_s = pipeline.receive_s if pipeline.overlaps else _RECEIVE_S
        self._overhead_s = 0.0
        self._measure_cores()
        self._present = self._run(self.present)
        self._fit()

    @property
    def measured_s(self) -> float:
        """Seconds from one batch to the next, without what lies around epochs' first batches."""
        waits = self.pipeline.wait_s
        if len(waits):
            return self.pipeline.t_down_s + max(0.0, float(waits.mean()))
        return max(self.pipeline.t_down_s, self.pipeline.t_up_s)

    @property
    def updates_per_s(self) -> float:
        """As measured; 0 where no time passed."""
        period = self.measured_s * max(1.0, self.pipeline.batches_per_update)
        return 1 / period if period > 1e-9 else 0.0

    def predict(self, settings: Settings) -> Prediction:
        """See the function of this name."""
        run, present = self._run(settings), self._present
        speedup = present.period_s / run.period_s if run.period_s > 1e-9 else 1.0
        # Where the present did not come out as measured, still no update takes less than its step.
        step_s = run.period_s - run.stall_s
        if step_s > 1e-9 and present.period_s > present.stall_s:
            least_s = self.pipeline.t_down_s * step_s / (present.period_s - present.stall_s)
            speedup = min(speedup, self.measured_s / least_s) if least_s > 1e-9 else speedup
        updates = self.updates_per_s * speedup
        factor = run.factor * (self.pipeline.echo_factor if is_echoed_inside(self.pipeline) else 1.0)
        per_update = self.pipeline.batch_size * max(1.0, self.pipeline.batches_per_update)
        return Prediction(
            updates_per_s=updates,
            fresh_per_s=updates * per_update / factor,
            stall_share=min(1.0, run.stall_s / run.period_s) if run.period_s > 1e-9 else 0.0,
            factor=factor,
            speedup=speedup,
        )

    def _fit(self) -> None:
        """Add what is lost between processes to each batch's service, so that the present is as measured.

        A second more for a batch is at most 1 / W seconds more for a period, so this never goes past the mark.
        Time lost elsewhere (where the consumer does not wait for the workers) does not become theirs.
        """
        for _ in range(4):
            missing = (self.measured_s - self._present.period_s) * self._fresh_factor()
            if abs(missing) < 0.005 * self.measured_s or not len(self.pipeline.wait_s):
                return
            if self._present.stall_s < 0.01 * self._present.period_s and missing < 0:
                return
            self._overhead_s += missing * max(1, self.present.num_workers)
            self._present = self._run(self.present)

    def _fresh_factor(self) -> float:
        return self.present.factor if isinstance(self.present.factor, float) else 1.0

    def _measure_cores(self) -> None:
        """How far computing is stretched now: by the others of this pipeline, and, the rest, by strangers."""
        cpu_s, step_s = float(self._cpu.mean()), float(self._step.mean())
        demand_s = cpu_s / self._fresh_factor() + self._step_cpu_s
        measured_s = self.measured_s
        self._cores = max(0.01, self.pipeline.cores, demand_s / measured_s if measured_s > 1e-9 else 0.0)
        self._num_threads = min(self._cores, max(1.0, self._step_cpu_s / step_s)) if step_s > 1e-9 else 1.0
        core_wait = _like(self.pipeline.core_wait_s, self.pipeline.service_s)
        self.stretch = 1 + float(core_wait.mean()) / cpu_s if cpu_s > 1e-9 and len(core_wait) else 1.0
        self._step_stretch, self._strangers = 1.0, 1.0
        self._step_computing_s = min(self._step_cpu_s, step_s)
        met, self._step_stretch = self._contention(
            self.present, cpu_s * self.stretch, self._step_computing_s, measured_s, self._fresh_factor()
        )
        self._strangers = self.stretch / met
        self._step_computing_s = min(self._step_cpu_s * self._step_stretch, step_s)

    def _run(self, settings: Settings) -> Run:
        """Simulate, with the stretch of computing that the simulation itself leads to."""
        cpu, wait = self._service(settings)
        cpu_s = float(cpu.mean())
        stretch, step_stretch = self.stretch, self._step_stretch
        for number in range(_ROUNDS):
            service = np.maximum(cpu * stretch + wait + self._overhead_s, 0.0)
            more_s = self._step_computing_s * (step_stretch / self._step_stretch - 1)
            step = np.maximum(self._step + more_s - settings.saved_step_s, 0.0)
            run = self._simulate(settings, service, step)
            demand_s = (cpu_s / run.factor_around + self._step_cpu_s) / self._cores
            if demand_s > run.period_s:
                run.stall_s += demand_s - run.period_s
                run.period_s = demand_s
            met, step_met = self._contention(
                settings, cpu_s * stretch, self._step_computing_s + more_s, run.period_s, run.factor_around
            )
            if abs(met - stretch) < 0.01 * stretch and abs(step_met - step_stretch) < 0.01 * step_stretch:
                break
            weight = 1.0 if number < 2 else 0.5
            stretch += weight * (met - stretch)
            step_stretch += weight * (step_met - step_stretch)
        return run

    def _contention(
        self, settings: Settings, computing_s: float, stepping_s: float, period_s: float, factor: float
    ) -> tuple[float, float]:
        """How far the computing of a worker, and of the step, is stretched by those that it meets.

        Seconds that a batch is computed on and that a step computes, of an update's period; updates to a batch.
        """
        num_workers = max(1, settings.num_workers)
        busy = stepping = 0.0
        if period_s > 1e-9 and not _is_in_turn(settings):
            busy = min(1.0, computing_s / (period_s * factor * num_workers))
            stepping = min(1.0, stepping_s / period_s)
        met = self._sharing(1.0, num_workers - 1, busy, self._num_threads, stepping)
        return max(1.0, self._strangers * met), self._sharing(self._num_threads, num_workers, busy, 0.0, 0.0)

    def _sharing(self, own: float, num_others: int, busy: float, num_threads: float, stepping: float) -> float:
        """E[max(1, n / cores)] for one that computes with `own` threads, beside others that may."""
        total = 0.0
        for k in range(num_others + 1):
            chance = math.comb(num_others, k) * busy**k * (1 - busy) ** (num_others - k)
            without = max(1.0, (own + k) / self._cores)
            total += chance * (without + stepping * (max(1.0, (own + k + num_threads) / self._cores) - without))
        return total

    def _service(self, settings: Settings) -> tuple[FloatArray, FloatArray]:
        """Computing and waiting of each batch that a worker makes."""
        cpu, wait = self._cpu, self._wait
        if settings.cached_after is not None:
            cpu_share, wait_share = before_shares(self.pipeline, settings.cached_after)
            cpu, wait = cpu * (1 - cpu_share), wait * (1 - wait_share)
        if settings.echo_after is not None:
            factor = settings.max_factor if isinstance(settings.factor, str) else settings.factor
            cpu_share, wait_share = before_shares(self.pipeline, settings.echo_after)
            first_uses = self._first_uses(factor)
            cpu = cpu * (1 - cpu_share) + _thinned(cpu * cpu_share, factor, first_uses)
            wait = wait * (1 - wait_share) + _thinned(wait * wait_share, factor, first_uses)
        return cpu, wait

    def _first_uses(self, factor: float) -> FloatArray:
        """The share of each batch that has to be read. Examples are drawn at random, so it varies around 1 / e."""
        rows = max(1, round(self.pipeline.batch_size))
        counts = np.random.default_rng(self._seed).binomial(rows, 1 / factor, self._num_batches)
        return np.asarray(counts / max(1, counts.sum()) * self._num_batches / factor, np.float64)

    def _simulate(self, settings: Settings, service: FloatArray, step: FloatArray) -> Run:
        if settings.echo_after is None and settings.factor != 1.0:
            return run_echoed(settings, service, step, self._receive_s)
        run = run_plain(settings, service, step, self._receive_s)
        if settings.echo_after is not None:
            run.factor = settings.max_factor if isinstance(settings.factor, str) else settings.factor
        return run


def present_settings(pipeline: Pipeline) -> Settings:
    """The settings that the pipeline was measured with."""
    return Settings(
        num_workers=pipeline.num_workers,
        prefetch_factor=pipeline.prefetch_factor or 2,
        factor=1.0 if is_echoed_inside(pipeline) else max(1.0, pipeline.echo_factor),
        max_factor=default_max_factor(int(pipeline.batch_size)),
    )


def split_service(pipeline: Pipeline) -> tuple[FloatArray, FloatArray]:
    """Seconds of computing and of waiting for something other than a core, for each batch; never empty."""
    service = np.maximum(pipeline.service_s, 0.0)
    if not len(service):
        return np.zeros(1), np.full(1, max(0.0, pipeline.t_up_s) * max(1, pipeline.num_workers))
    cpu = np.minimum(_like(pipeline.service_cpu_s, service), service)
    return cpu, np.maximum(service - cpu - _like(pipeline.core_wait_s, service), 0.0)


def stage_parts(pipeline: Pipeline) -> list[tuple[Stage, float, float]]:
    """Each stage with its computing and its waiting in a batch, in seconds, without the wait for a core."""
    cpu_s = float(pipeline.service_cpu_s.mean()) if len(pipeline.service_cpu_s) else 0.0
    core_s = float(pipeline.core_wait_s.mean()) if len(pipeline.core_wait_s) else 0.0
    stretch = 1 + core_s / cpu_s if cpu_s > 0 else 1.0
    parts = []
    for stage in pipeline.stages:
        count = 1.0 if stage.name == "collate" else pipeline.batch_size
        cpu = min(stage.cpu_s, stage.wall_s)
        parts.append((stage, count * cpu, count * max(0.0, stage.wall_s - cpu * stretch)))
    return parts


def before_shares(pipeline: Pipeline, name: str) -> tuple[float, float]:
    """The share of a batch's computing, and of its waiting, in the stages up to and with `name`."""
    parts = stage_parts(pipeline)
    cut = [stage.name for stage, _, _ in parts].index(name) + 1
    times = np.array([part[1:] for part in parts])
    totals, upto = times.sum(axis=0).tolist(), times[:cut].sum(axis=0).tolist()
    # What the stages do not show at all is shared out like the rest of their time.
    overall = sum(upto) / sum(totals) if sum(totals) > 0 else 0.0
    shares = [part / total if total > 0 else overall for part, total in zip(upto, totals, strict=True)]
    return min(1.0, shares[0]), min(1.0, shares[1])


def is_echoed_inside(pipeline: Pipeline) -> bool:
    """Whether the workers' service is that of echoed batches already."""
    return pipeline.name == "EchoDataLoader"


def _is_in_turn(settings: Settings) -> bool:
    """Whether batches and updates are made in turn, by the main process."""
    return not settings.num_workers and (settings.echo_after is not None or settings.factor == 1.0)


def _like(values: FloatArray, other: FloatArray) -> FloatArray:
    """`values`, or zeros where they were not measured for each of `other`."""
    return np.maximum(values, 0.0) if len(values) == len(other) else np.zeros(len(other))


def _blocks(length: int, count: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Indices below `length`, in blocks in a random order, each as often as the others, `count` in all."""
    size = max(_BLOCK, length // 8)
    starts = np.arange(0, length, size)
    passes = [
        np.concatenate([np.arange(start, min(start + size, length)) for start in rng.permutation(starts)])
        for _ in range(math.ceil(count / length))
    ]
    return np.concatenate(passes)[:count]


def _thinned(values: FloatArray, factor: float, first_uses: FloatArray) -> FloatArray:
    """What each batch has to read where a use is one of `factor`.

    A batch reads a part of its examples (`first_uses`), and what one example costs beyond the usual falls on one
    batch in `factor`, as long as ever.
    """
    usual = np.minimum(values, _SPIKE * float(np.median(values)))
    spikes = values - usual
    thinned = usual * first_uses
    if spikes.any():
        places = (np.arange(len(values)) * factor).astype(np.int64)
        kept = places < len(values)
        np.add.at(thinned, places[kept], spikes[kept])
    return thinned
