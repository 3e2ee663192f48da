"""What to change in a loader before echoing is thought of, each with what the model predicts.

Every function takes a Model and returns an AdviceRecord, or None where that change would not help.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import psutil

from stretto.profile.model import Model, Prediction, stage_parts
from stretto.profile.pipeline import fixed_stages
from stretto.profile.schema import AdviceRecord

HELPS = 1.05
"""The least speed-up that is worth a piece of advice."""
ENOUGH = 0.97
"""The share of the best rate from which on more is not worth it."""

_MOST_WORKERS = 32
_PREFETCHES = (4, 8, 16, 32)
_MOST_QUEUED_BYTES = 1 << 30
_SHARE_OF_MEMORY = 0.8
_PINNED_SHARE = 0.5
"""Of a copy's time, what it takes from pinned memory: an assumption, said where it is used."""

T = TypeVar("T")


def make_record(action: str, title: str, why: str, prediction: Prediction | None, **fields: Any) -> AdviceRecord:
    """A record with the fields given, and those of the prediction."""
    record: dict[str, Any] = {
        "action": action,
        "title": title,
        "why": why,
        "change": {},
        **dict.fromkeys(
            ("where", "ratio", "factor", "buffer_items", "buffer_bytes", "speedup_measured", "command")
        ),
        "updates_per_s": prediction and prediction.updates_per_s,
        "fresh_per_s": prediction and prediction.fresh_per_s,
        "speedup": prediction and prediction.speedup,
    }
    return cast(AdviceRecord, record | fields)


def smallest(options: Sequence[T], predict: Callable[[T], Prediction]) -> tuple[T, Prediction] | None:
    """The first of `options`, which rise in what they give, that gives nearly what the last one does.

    None where no option helps.
    """
    if not options:
        return None
    seen = {len(options) - 1: predict(options[-1])}
    target = ENOUGH * seen[len(options) - 1].speedup

    def is_enough(place: int) -> bool:
        seen[place] = predict(options[place])
        return seen[place].speedup >= target

    found = bisect.bisect_left(range(len(options) - 1), True, key=is_enough)
    prediction = seen[found]
    return (options[found], prediction) if prediction.speedup >= HELPS else None


def workers(model: Model) -> AdviceRecord | None:
    """More workers, or some where there are none, and so nothing is made while updates run."""
    pipeline, now = model.pipeline, model.pipeline.num_workers
    ratio = pipeline.ratio if math.isfinite(pipeline.ratio) else float(_MOST_WORKERS)
    most = min(_MOST_WORKERS, max(now + 1, math.ceil(1.5 * max(1, now) * ratio) + 1))
    found = smallest(
        range(now + 1, most + 1), lambda number: model.predict(replace(model.present, num_workers=number))
    )
    if found is None:
        return None
    number, prediction = found
    why = f"The loop waits {percent(stall_share(model))} of the time. "
    if now:
        title = f"Use {number} workers instead of {now}"
        why += (
            f"A worker takes {ms(service_s(model))} for a batch, {percent(computing_share(model))} of it "
            f"computing: more of them help as far as {pipeline.cores:g} cores allow."
        )
    else:
        title = f"Make batches while updates run: num_workers={number}"
        why += (
            f"With num_workers=0 the main process makes each batch ({ms(pipeline.t_up_s)}) between two updates "
            f"({ms(pipeline.t_down_s)} each)."
        )
    if not pipeline.is_map_style:
        why += " The data set is iterable: it must deal its examples out to its workers (get_worker_info)."
    return make_record(
        "workers" if now else "overlap",
        title,
        why,
        prediction,
        change={"num_workers": number},
        command=f"--workers {number}",
    )


def prefetch(model: Model) -> AdviceRecord | None:
    """A longer queue, for bursts."""
    pipeline = model.pipeline
    if not pipeline.num_workers:
        return None
    batch_bytes, now = pipeline.batch_bytes or 0, model.present.prefetch_factor
    options = [
        number
        for number in _PREFETCHES
        if number > now and number * pipeline.num_workers * batch_bytes <= _MOST_QUEUED_BYTES
    ]
    found = smallest(options, lambda number: model.predict(replace(model.present, prefetch_factor=number)))
    if found is None:
        return None
    number, prediction = found
    queued = number * pipeline.num_workers
    why = (
        f"The loop waits {percent(stall_share(model))} of the time, in bursts: fast batches before a slow one are "
        f"not made ahead, since no more than {now * pipeline.num_workers} are ever queued."
    )
    return make_record(
        "prefetch",
        f"Queue more batches ahead: prefetch_factor={number}",
        why,
        prediction,
        change={"prefetch_factor": number},
        buffer_bytes=queued * batch_bytes or None,
        command=f"--prefetch {number}",
    )


def persistent_workers(model: Model) -> AdviceRecord | None:
    """Workers that outlive an epoch."""
    pipeline = model.pipeline
    if not pipeline.num_workers or pipeline.persistent_workers or not len(pipeline.first_wait_s):
        return None
    length = pipeline.num_batches or len(pipeline.step_s) // max(1, pipeline.num_epochs)
    first_s = float(pipeline.first_wait_s.mean())
    # Of an epoch's batches all but one are waited for as measured, and the first one longer.
    epoch_s = length * pipeline.t_down_s + (length - 1) * (model.measured_s - pipeline.t_down_s) + first_s
    saved_s = first_s - service_s(model)
    if pipeline.num_epochs < 2 or saved_s <= 0 or epoch_s - saved_s <= 1e-9:
        return None
    speedup = epoch_s / (epoch_s - saved_s)
    if speedup < HELPS or not model.updates_per_s:
        return None
    updates = length / max(1.0, pipeline.batches_per_update) / (epoch_s - saved_s)
    fresh = updates * pipeline.batch_size * max(1.0, pipeline.batches_per_update) / max(1.0, pipeline.echo_factor)
    return make_record(
        "persistent_workers",
        "Keep the workers from epoch to epoch: persistent_workers=True",
        f"Each epoch begins with a wait of {first_s:.2f} s, {percent(first_s / epoch_s)} of it, for workers to "
        f"start; a batch itself takes {ms(service_s(model))}. The prediction counts epochs with their starts.",
        None,
        change={"persistent_workers": True},
        updates_per_s=updates,
        fresh_per_s=fresh,
        speedup=speedup,
    )


def pin_memory(model: Model) -> AdviceRecord | None:
    """Page-locked batches, for faster copies to an accelerator."""
    pipeline = model.pipeline
    if pipeline.device == "cpu" or pipeline.pin_memory or pipeline.transfer_s <= 0:
        return None
    prediction = model.predict(replace(model.present, saved_step_s=_PINNED_SHARE * pipeline.transfer_s))
    if prediction.speedup < HELPS:
        return None
    return make_record(
        "pin_memory",
        "Copy from pinned memory: pin_memory=True, and .to(device, non_blocking=True)",
        f"Moving a batch to {pipeline.device} takes {ms(pipeline.transfer_s)} of every {ms(model.measured_s)}. "
        "The prediction takes it that pinned memory halves that.",
        prediction,
        change={"pin_memory": True},
    )


def cache(model: Model) -> AdviceRecord | None:
    """Results of a stage kept for good: the earliest stage that gives nearly the most, and fits in memory.

    Not of a random stage or one behind it: the augmentation would be the same in every epoch.
    """
    pipeline = model.pipeline
    if not pipeline.is_map_style or not pipeline.num_examples or pipeline.num_epochs < 2:
        return None
    available = _SHARE_OF_MEMORY * psutil.virtual_memory().available
    holders = max(1, pipeline.num_workers)
    sizes = {}
    for stage in fixed_stages(insertion_stages(model)):
        size = (stage.item_bytes or 0) * pipeline.num_examples * holders
        if 0 < size <= available:
            sizes[stage.name] = int(size)
    found = smallest(list(sizes), lambda name: model.predict(replace(model.present, cached_after=name)))
    if found is None:
        return None
    name, prediction = found
    held = f" in each of {holders} workers" if holders > 1 else ""
    return make_record(
        "cache",
        f'Keep what "{name}" returns in memory',
        f"All {pipeline.num_examples} examples take {size_text(sizes[name])}{held and ', counted' + held}: that "
        f'fits. Once it is filled, best before workers start, only what follows "{name}" runs. Do so only if '
        "nothing random happens up to there.",
        prediction,
        change={"cache_after": name},
        where=name,
        buffer_items=pipeline.num_examples,
        buffer_bytes=sizes[name],
    )


def slow_stage(model: Model) -> AdviceRecord | None:
    """The stage that takes most of a worker's time, and whether it computes or waits."""
    parts = stage_parts(model.pipeline)
    walls = [cpu + wait for _, cpu, wait in parts]
    if not parts or sum(walls) <= 0 or stall_share(model) < 0.1:
        return None
    place = walls.index(max(walls))
    stage, cpu_s, wait_s = parts[place]
    share = walls[place] / sum(walls)
    if share < 0.4:
        return None
    is_computing = cpu_s >= wait_s
    of_that = (
        f"{percent(max(cpu_s, wait_s) / walls[place])} of that is {'computing' if is_computing else 'waiting'}"
    )
    what = (
        "a faster implementation, smaller examples or more cores shorten it; more workers than cores do not"
        if is_computing
        else "more workers wait at once, and a local or larger-grained copy of the data waits less"
    )
    return make_record(
        "stage",
        f'Make "{stage.name}" faster: it takes {percent(share)} of a worker\'s time',
        f'"{stage.name}" takes {percent(share)} of a worker\'s time and {of_that}: {what}.',
        None,
        change={"stage": stage.name},
        where=stage.name,
    )


def insertion_stages(model: Model) -> list[Any]:
    """The stages behind which things can be kept."""
    return [stage for stage in model.pipeline.stages if stage.name != "collate"]


def stall_share(model: Model) -> float:
    """Of the time within an epoch, in which the loop waits."""
    return 1 - model.pipeline.t_down_s / model.measured_s if model.measured_s > 1e-9 else 0.0


def service_s(model: Model) -> float:
    """Mean seconds that a worker spends on a batch."""
    pipeline = model.pipeline
    return float(pipeline.service_s.mean()) if len(pipeline.service_s) else pipeline.t_up_s


def computing_share(model: Model) -> float:
    """Of that, what is computing."""
    cpu = model.pipeline.service_cpu_s
    return min(1.0, float(cpu.mean()) / service_s(model)) if len(cpu) and service_s(model) > 0 else 0.0


def percent(share: float) -> str:
    """Such as "71 %"."""
    return f"{100 * share:.0f} %"


def ms(seconds: float) -> str:
    """Such as "4.2 ms"."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def size_text(num_bytes: float) -> str:
    """Such as "1.5 GiB"."""
    power = min(4, int(math.log2(max(1.0, num_bytes)) / 10))
    return f"{num_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
