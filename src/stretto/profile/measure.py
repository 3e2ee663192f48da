"""From the files of one process to what is known of its loaders: Pipelines, for the advice, and a RankRecord."""

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.profile.batches import can_be_pooled
from stretto.profile.pipeline import FloatArray, Pipeline, Stage
from stretto.profile.schema import LoaderRecord, Percentiles, RankRecord, StageRecord, Window
from stretto.profile.timeline import Timeline, read_timeline
from stretto.profile.worker_logs import WorkerLog, mean_stages, read_worker_logs

_WINDOWS = 120
_BATCHES_IN_WINDOW = 4
_UNSETTLED = 8  # batches, at most
_NO_STEP = 20.0  # times the median
_RARE = 0.02  # of the batches
_WORST = 0.01  # the share of the batches that counts as a burst


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one process wrote."""

    meta: dict[str, Any]
    timeline: Timeline
    workers: list[WorkerLog]
    """Of its loaders."""


def read_ranks(directory: Path, skip: int = 0) -> list[RankFiles]:
    """The processes that wrote into `directory`, by rank, from their batch `skip` on; workers are left out."""
    found: list[RankFiles] = []
    for path in sorted(directory.glob("rank-*.json")):
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["is_worker"]:
            continue
        training = {loader["number"] for loader in meta["loaders"] if loader["is_training"]}
        timeline = read_timeline(path.with_suffix(".rows"), training).take(slice(skip, None))
        workers = read_worker_logs(directory / f"workers-{meta['pid']}")
        found.append(RankFiles(meta, timeline, workers))
    return sorted(found, key=lambda rank: (rank.meta["rank"], rank.meta["pid"]))


def measure_pipelines(files: RankFiles, cores: float) -> dict[int, Pipeline]:
    """A Pipeline for each loader, by number, that fed updates."""
    numbers = [int(number) for number in np.unique(files.timeline.loader)]
    return {number: _pipeline(files, number, cores) for number in numbers}


def _pipeline(files: RankFiles, number: int, cores: float) -> Pipeline:
    loader = files.meta["loaders"][number]
    timeline = files.timeline.of(number)
    settled = _settled(timeline)
    logs = _logs_of(files, loader)
    looks = loader["looks"]
    sizes = [look["num_examples"] for look in looks if look["num_examples"] is not None]
    rows = later_batches(logs)
    order = np.argsort(np.concatenate([log.end for log in rows])) if rows else np.array([], int)
    updates_per_batch = timeline.num_updates / len(timeline.begin) if len(timeline.begin) else 1.0
    return Pipeline(
        name=loader["name"],
        dataset=loader["dataset"],
        is_map_style=loader["is_map_style"],
        num_workers=loader["num_workers"],
        prefetch_factor=loader["prefetch_factor"],
        pin_memory=loader["pin_memory"],
        persistent_workers=loader["persistent_workers"],
        batch_size=float(np.mean(sizes)) if sizes else 1.0,
        batch_bytes=looks[0]["num_bytes"] if looks else None,
        num_batches=loader["length"],
        num_examples=loader["num_examples"],
        num_epochs=loader["iterations"],
        can_be_echoed_by_example=can_be_pooled(looks),
        echo_factor=max(1.0, loader["echo"]["realised"]) if loader["echo"] else 1.0,
        cores=cores,
        device=files.meta["device"],
        stages=mean_stages(logs),
        service_s=_joined([log.end - log.begin for log in rows], order),
        service_cpu_s=_joined([log.cpu_s for log in rows], order),
        core_wait_s=_joined([log.core_wait_s for log in rows], order),
        wait_s=settled.wait[~settled.is_first],
        step_s=settled.step,
        step_cpu_s=float(settled.step_cpu.mean()) if len(settled.step_cpu) else 0.0,
        first_wait_s=timeline.wait[timeline.is_first],
        receive_s=_receive_s(loader, settled),
        transfer_s=loader["transfer_s"],
        batches_per_update=1 / updates_per_batch if updates_per_batch else 1.0,
    )


def _settled(timeline: Timeline) -> Timeline:
    """Without the first batches, in which models are compiled, and the few with which something else was done.

    A mean over what is left tells what a step takes; time spent on a checkpoint in the loop is not the step's.
    """
    num = len(timeline.begin)
    is_settled = np.arange(num) >= min(_UNSETTLED, num // 8)
    if is_settled.sum() > 1:
        is_rare = timeline.step > _NO_STEP * np.median(timeline.step[is_settled])
        if is_rare[is_settled].mean() <= _RARE:
            is_settled &= ~is_rare
    return timeline.take(is_settled)


def _logs_of(files: RankFiles, loader: dict[str, Any]) -> list[WorkerLog]:
    numbers = {loader["number"], loader["wraps"]}
    return [log for log in files.workers if log.loader in numbers]


def later_batches(logs: list[WorkerLog]) -> list[WorkerLog]:
    """Logs in order of time without the first batch of each worker in an iteration; with it if nothing is left.

    A worker may open files at its first batch. The loop waits for these at an epoch's start, which `wait_s` leaves
    out, so among the others they would tell of time that nobody waited for.
    """
    rows = sorted((log for log in logs if len(log.begin)), key=lambda log: log.begin[0])
    seen: set[tuple[int, int, int]] = set()
    later = []
    for log in rows:
        worker = log.iteration, log.worker_id, log.pid
        later.append(log.take(slice(worker not in seen, None)))
        seen.add(worker)
    later = [log for log in later if len(log.begin)]
    return later or rows


def _receive_s(loader: dict[str, Any], timeline: Timeline) -> float:
    is_echoed_around = loader["echo"] is not None and loader["echo"]["unit"] != "workers"
    receiving = timeline.wait_cpu[~timeline.is_first]
    if not loader["num_workers"] or is_echoed_around or not len(receiving):  # then it is not receiving alone
        return 0.0
    return float(receiving.mean())


def _joined(parts: list[FloatArray], order: NDArray[np.int64]) -> FloatArray:
    return np.concatenate(parts)[order] if parts else np.array([])


def measure_rank(files: RankFiles, pipelines: dict[int, Pipeline], begin_s: float) -> RankRecord:
    """The record of one process. `begin_s`: when the command started, by perf_counter."""
    meta, timeline = files.meta, files.timeline
    waits = timeline.wait[~timeline.is_first]
    first_wait_s = float(timeline.wait[timeline.is_first].sum())
    wait_s, update_s = float(waits.sum()), float(timeline.step.sum())
    other_s = float(timeline.other[:-1].sum()) if len(timeline.other) else 0.0
    total_s = wait_s + first_wait_s + update_s + other_s
    transfer_s = min(update_s, sum(p.transfer_s * len(p.step_s) for p in pipelines.values()))
    updates = timeline.num_updates
    return RankRecord(
        rank=meta["rank"],
        world_size=meta["world_size"],
        pid=meta["pid"],
        host=meta["host"],
        device=meta["device"],
        updates=updates,
        optimizer_steps=int(timeline.steps.sum()),
        optimizers=meta["optimizers"],
        batches=len(timeline.begin),
        time={
            "total_s": total_s,
            "update_s": update_s - transfer_s,
            "wait_s": wait_s,
            "first_wait_s": first_wait_s,
            "transfer_s": transfer_s,
            "other_s": other_s,
        },
        au_percent=_percent(update_s - transfer_s, total_s),
        stall_percent=_percent(wait_s + first_wait_s, total_s),
        updates_per_s=updates / total_s if total_s else 0.0,
        s_per_update=(total_s - other_s) / updates if updates else 0.0,
        wait_ms=_percentiles(waits) or _NONE,
        step_ms=_percentiles(timeline.step) or _NONE,
        burst_share=_burst_share(waits),
        loaders=[_loader_record(files, loader, pipelines.get(loader["number"])) for loader in meta["loaders"]],
        timeline=_windows(files, pipelines, begin_s),
        ended=meta["ended"] or "ended without notice",
    )


def _percent(part: float, total: float) -> float:
    return 100 * part / total if total else 0.0


_NONE = Percentiles(mean=0.0, p50=0.0, p90=0.0, p99=0.0, max=0.0)


def _percentiles(seconds: FloatArray) -> Percentiles | None:
    if not len(seconds):
        return None
    p50, p90, p99 = (float(value) * 1e3 for value in np.percentile(seconds, [50, 90, 99]))
    return Percentiles(mean=float(seconds.mean()) * 1e3, p50=p50, p90=p90, p99=p99, max=float(seconds.max()) * 1e3)


def _burst_share(waits: FloatArray) -> float:
    total = float(waits.sum())
    worst = np.sort(waits)[::-1][: max(1, round(_WORST * len(waits)))]
    return float(worst.sum()) / total if total else 0.0


def _loader_record(files: RankFiles, loader: dict[str, Any], pipeline: Pipeline | None) -> LoaderRecord:
    logs = _logs_of(files, loader)
    services = [log.end - log.begin for log in logs]
    service = np.concatenate(services) if services else np.array([])
    total = float(service.sum())
    queued = files.timeline.of(loader["number"]).queued
    queued = queued[~np.isnan(queued)]
    first, last = (None, None) if pipeline is None else _drift(files, loader["number"], pipeline)
    looks = loader["looks"]
    return LoaderRecord(
        name=loader["name"],
        dataset=loader["dataset"],
        is_training=loader["is_training"],
        num_workers=loader["num_workers"],
        prefetch_factor=loader["prefetch_factor"],
        pin_memory=loader["pin_memory"],
        persistent_workers=loader["persistent_workers"],
        batch_size=None if not looks or looks[0]["num_examples"] is None else float(looks[0]["num_examples"]),
        batch_bytes=looks[0]["num_bytes"] if looks else None,
        length=loader["length"],
        iterations=loader["iterations"],
        batches=loader["batches"],
        overlaps=loader["num_workers"] > 0,
        t_up_s=None if pipeline is None else pipeline.t_up_s,
        t_down_s=None if pipeline is None else pipeline.t_down_s,
        ratio=None if pipeline is None else pipeline.ratio,
        ratio_first=first,
        ratio_last=last,
        service_ms=_percentiles(service),
        cpu_share=min(1.0, sum(float(log.cpu_s.sum()) for log in logs) / total) if total else None,
        core_wait_share=min(1.0, sum(float(log.core_wait_s.sum()) for log in logs) / total) if total else None,
        queue_mean=float(queued.mean()) if len(queued) else None,
        queue_empty_share=float((queued == 0).mean()) if len(queued) else None,
        stages=[_stage_record(stage) for stage in mean_stages(logs)],
        echo=loader["echo"],
        why_not_echoed=loader["why_not_echoed"],
    )


def _stage_record(stage: Stage) -> StageRecord:
    return StageRecord(
        name=stage.name, wall_ms=stage.wall_s * 1e3, cpu_ms=stage.cpu_s * 1e3, item_bytes=stage.item_bytes
    )


def _drift(files: RankFiles, number: int, pipeline: Pipeline) -> tuple[float | None, float | None]:
    """R in the first and the last quarter of the batches."""
    timeline = files.timeline.of(number)
    quarter = len(timeline.begin) // 4
    if quarter < _BATCHES_IN_WINDOW:
        return None, None
    ends = (timeline.take(slice(0, quarter)), timeline.take(slice(-quarter, None)))
    first, last = (_ratio_of(files, pipeline, number, part) for part in ends)
    return first, last


def _ratio_of(files: RankFiles, pipeline: Pipeline, number: int, part: Timeline) -> float | None:
    """R over a part of the fetches."""
    waits = part.wait[~part.is_first]
    if not len(waits) or not part.step.sum():
        return None
    since, until = part.begin[0], part.end[-1]
    logs = _logs_of(files, files.meta["loaders"][number])
    inside = [(log.end - log.begin)[(log.end >= since) & (log.end <= until)] for log in logs]
    service = np.concatenate(inside) if inside else np.array([])
    factor = float(part.factor.mean())
    slice_of = replace(pipeline, wait_s=waits, step_s=part.step, service_s=service, echo_factor=max(1.0, factor))
    return slice_of.ratio


def _windows(files: RankFiles, pipelines: dict[int, Pipeline], begin_s: float) -> list[Window]:
    """The timeline in at most `_WINDOWS` parts of equally many batches."""
    timeline = files.timeline
    num = len(timeline.begin)
    if not num:
        return []
    main = max(pipelines, key=lambda number: float((timeline.loader == number).sum()))
    edges = np.unique(np.linspace(0, num, min(_WINDOWS, max(1, num // _BATCHES_IN_WINDOW)) + 1).astype(int))
    windows = []
    for low, high in itertools.pairwise(edges):
        part = timeline.take(slice(low, high))
        other = part.other if high < num else part.other[:-1]
        until = timeline.begin[high] if high < num else timeline.begin[0] + timeline.total_s
        windows.append(
            Window(
                t=float(part.begin[0]) - begin_s,
                seconds=float(until - part.begin[0]),
                updates=part.num_updates,
                update_s=float(part.step.sum()),
                wait_s=float(part.wait.sum()),
                other_s=float(other.sum()),
                ratio=_ratio_of(files, pipelines[main], main, part.of(main)),
                factor=float(part.factor[-1]),
            )
        )
    return windows
