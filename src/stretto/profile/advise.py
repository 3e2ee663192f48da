"""What to change, ranked by what the model predicts, and the verdict on a pipeline.

    remedies.py    the loader's arguments, a cache, a slow stage
    insertion.py   echoing, at every point where it can begin

Ranked by predicted time to a target: an echoed update counts at the measured worth of a repeated use. Of changes
whose times are within a tenth of each other the cheapest comes first: arguments of the loader, then a cache, then
an echo. A loop that does not overlap is told that first.
"""

import math

import numpy as np

from stretto.profile.insertion import echo_records
from stretto.profile.model import Model, stage_parts
from stretto.profile.pipeline import HELPS_FROM_R, Pipeline
from stretto.profile.remedies import (
    HELPS,
    cache,
    make_record,
    ms,
    percent,
    persistent_workers,
    pin_memory,
    prefetch,
    slow_stage,
    stall_share,
    workers,
)
from stretto.profile.schema import AdviceRecord

GOOD_AU = 0.9
"""MLPerf Storage's pass mark."""

_COSTS = {"cache": 1, "echo": 2}
_REMEDIES = (workers, prefetch, persistent_workers, pin_memory, cache)
_WITHIN = 1.1
_ECHOED = 1.01  # the realised factor from which on a loader is echoed


def advise(pipeline: Pipeline) -> list[AdviceRecord]:
    """What to do, best first; a single record with action "none" where nothing would help.

    With an echo among them, the points where echoing would not help come last.
    """
    model = Model(pipeline)
    if not model.updates_per_s:
        return [make_record("none", "Nothing to advise", "No time was measured: no wait and no step.", None)]
    helping = [record for remedy in _REMEDIES if (record := remedy(model)) is not None]
    others = [record for record in [slow_stage(model)] if record is not None]
    if not _is_echoed(pipeline) and pipeline.ratio >= HELPS_FROM_R:
        for record in echo_records(model):
            (helping if (record["speedup"] or 0) >= HELPS else others).append(record)
    if not helping and all(record["action"] == "echo" for record in others):
        return [_none(model)]
    best = max((_speedup(record) for record in helping), default=1.0)

    def rank(record: AdviceRecord) -> tuple[bool, int, int, float]:
        speedup = _speedup(record)
        behind = int(math.log(best / speedup) / math.log(_WITHIN))
        return record["action"] != "overlap", behind, _COSTS.get(record["action"], 0), -speedup

    return sorted(helping, key=rank) + others


def verdict(pipeline: Pipeline, advice: list[AdviceRecord]) -> tuple[str, list[str], str]:
    """What the run waits for in a line, the figures that say so, and what to do first.

    Args:
        pipeline: what was measured.
        advice: of `advise`, for this pipeline.
    """
    model = Model(pipeline)
    step_s, wait_s, first_s = (
        float(values.sum()) for values in (pipeline.step_s, pipeline.wait_s, pipeline.first_wait_s)
    )
    total_s = step_s + wait_s + first_s
    if total_s <= 1e-9:
        return "Nothing was measured: no step and no wait.", [], "Run more updates."
    waiting = (wait_s + first_s) / total_s
    if step_s / total_s >= GOOD_AU:
        line = f"Not input-bound: the updates run {percent(step_s / total_s)} of the time, which is fine."
    elif not pipeline.overlaps and not _is_echoed(pipeline):
        line = (
            f"Not overlapped: with num_workers=0 nothing is made while updates run, and they wait "
            f"{percent(waiting)} of the time."
        )
    elif first_s > wait_s and first_s > 0.05 * total_s:
        line = (
            f"Input-bound where epochs begin: the updates wait {percent(waiting)} of the time, "
            f"{percent(first_s / (wait_s + first_s))} of that for epochs' first batches."
        )
    else:
        line = f"Input-bound: the updates wait {percent(waiting)} of the time{_what_workers_do(pipeline)}"
    return line, _evidence(model), _next_step(advice, is_fine=step_s / total_s >= GOOD_AU)


def _none(model: Model) -> AdviceRecord:
    pipeline, stall = model.pipeline, stall_share(model)
    ratio = pipeline.ratio if math.isfinite(pipeline.ratio) else None
    figures = f"the updates wait {percent(stall)} of the time" + (
        "" if ratio is None else f", and R is {ratio:.2g}"
    )
    if _is_echoed(pipeline):
        title = f"Leave the echo as it is: {figures}"
        why = f"Each fresh batch has {pipeline.echo_factor:.3g} uses already. " + (
            "They do not fill all of the wait: a higher factor fills more, and each use is worth less."
            if stall >= 1 - 1 / HELPS
            else "Nothing is left to fill."
        )
    else:
        title = f"Echoing will not help: {figures}"
        why = (
            f"A fresh batch is made in {ms(pipeline.t_up_s)}, what is done with it takes {ms(pipeline.t_down_s)}. "
        )
        if ratio is not None and ratio < HELPS_FROM_R:
            why += f"Below R = {HELPS_FROM_R} repeated uses save no time worth having. "
        why += "No setting is predicted to give more than a few percent: only a faster step makes this faster."
    return make_record("none", title, why, model.predict(model.present), ratio=ratio)


def _is_echoed(pipeline: Pipeline) -> bool:
    return pipeline.echo_factor > _ECHOED


def _speedup(record: AdviceRecord) -> float:
    measured = record["speedup_measured"]
    return max(1e-9, (record["speedup"] or 1.0) if measured is None else measured)


def _shares(pipeline: Pipeline) -> tuple[float, float, float] | None:
    """Of a worker's time on a batch: computing, waiting, ready but without a core. None where it was not seen."""
    service_s = float(pipeline.service_s.sum())
    if service_s <= 0 or not len(pipeline.service_cpu_s):
        return None
    computing = min(1.0, float(pipeline.service_cpu_s.sum()) / service_s)
    without_core = min(1 - computing, float(pipeline.core_wait_s.sum()) / service_s)
    return computing, 1 - computing - without_core, without_core


def _what_workers_do(pipeline: Pipeline) -> str:
    """The end of the verdict's sentence: what the workers' time goes into, and in which stage."""
    shares = _shares(pipeline)
    if shares is None:
        return "; what the workers do meanwhile could not be seen."
    computing, waiting, without_core = shares
    parts = stage_parts(pipeline)
    busy = float(pipeline.service_s.mean()) / max(1, pipeline.num_workers)
    if busy < 0.5 * pipeline.t_up_s:
        return (
            f", but the workers are idle most of it: a batch takes them {ms(busy * max(1, pipeline.num_workers))}. "
            "It is lost between processes, or in bursts."
        )
    if waiting >= 0.5:
        stage, _, wait_s = max(parts, key=lambda part: part[2], default=(None, 0.0, 0.0))
        what = f'in "{stage.name}"' if stage is not None and wait_s > 0 else "for reads"
        if stage is not None and stage is pipeline.stages[0]:
            what = f'for reads (in "{stage.name}")'
        return f", and workers spend {percent(waiting)} of theirs waiting {what}."
    if without_core > computing:
        return f", and workers could run but have no core for {percent(without_core)} of theirs."
    stage, cpu_s, _ = max(parts, key=lambda part: part[1], default=(None, 0.0, 0.0))
    what = f', most of it in "{stage.name}"' if stage is not None and cpu_s > 0 else ""
    return f", and workers spend {percent(computing)} of theirs computing{what}."


def _evidence(model: Model) -> list[str]:
    pipeline = model.pipeline
    lines = []
    if len(pipeline.step_s) and len(pipeline.wait_s):
        wait_s = float(pipeline.wait_s.mean())
        lines.append(f"The loop waits {ms(wait_s)} for a batch, and a step takes {ms(pipeline.t_down_s)}.")
    if math.isfinite(pipeline.ratio):
        lines.append(
            f"A fresh batch is made in {ms(pipeline.t_up_s)}: R = t_up / t_down is {pipeline.ratio:.2g} at the "
            "loader's end."
        )
    who = f"Each of {pipeline.num_workers} workers" if pipeline.overlaps else "The main process"
    if (shares := _shares(pipeline)) is not None:
        computing, waiting, without_core = shares
        lines.append(
            f"{who} spends {ms(float(pipeline.service_s.mean()))} on a batch: {percent(computing)} computing, "
            f"{percent(waiting)} waiting, {percent(without_core)} ready but without a core."
        )
    parts = stage_parts(pipeline)
    total_s = sum(cpu + wait for _, cpu, wait in parts)
    for stage, cpu_s, wait_s in parts:
        if cpu_s + wait_s >= 0.2 * total_s > 0:
            kind, most = ("computing", cpu_s) if cpu_s >= wait_s else ("waiting", wait_s)
            share = (cpu_s + wait_s) / total_s
            lines.append(
                f'"{stage.name}" takes {percent(share)} of that, {percent(most / (cpu_s + wait_s))} of it {kind}.'
            )
    waits = np.sort(pipeline.wait_s)[::-1]
    worst = float(waits[: max(1, len(waits) // 100)].sum())
    if len(waits) >= 100 and worst >= 0.25 * float(waits.sum()) > 0:
        lines.append(f"It waits in bursts: the longest 1 % of waits hold {percent(worst / float(waits.sum()))}.")
    if len(pipeline.first_wait_s):
        lines.append(f"An epoch's first batch takes {ms(float(pipeline.first_wait_s.mean()))}.")
    return lines


def _next_step(advice: list[AdviceRecord], *, is_fine: bool) -> str:
    first = advice[0] if advice else None
    if first is None or first["action"] == "none":
        return "Leave the input as it is." if is_fine else (first["title"] if first else "Run more updates.") + "."
    gain = ""
    if first["action"] == "echo" and first["speedup_measured"] is not None:
        gain = f", predicted to reach a target {first['speedup_measured']:.2f} times sooner"
    elif first["speedup"] is not None:
        gain = f", predicted to give {first['speedup']:.2f} times the updates a second"
    return f"{'Nothing has to be done. For more: ' if is_fine else ''}{first['title']}{gain}."
