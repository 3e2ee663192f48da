"""Every place where a pipeline can be echoed, with R there, a factor, a buffer and what that is predicted to give.

Inside the workers, after each stage (EchoDataLoader), the stages that follow run for each use: R falls as the echo
point moves up. After the loader examples or whole batches are used again (`stretto.echo`). See docs/where.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stretto.echo.buffer import DEFAULT_BATCHES, DEFAULT_BYTES
from stretto.echo.factor import Factor
from stretto.echo.plan import SLOT_BYTES
from stretto.profile.model import Model, Prediction, before_shares, split_service
from stretto.profile.pipeline import HELPS_FROM_R, Stage, fixed_stages
from stretto.profile.remedies import HELPS, insertion_stages, make_record, ms, size_text, smallest
from stretto.profile.schema import AdviceRecord
from stretto.profile.simulate import Settings
from stretto.profile.worth import SOURCE, Where, speedup_to_target

_FACTORS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """An insertion point."""

    where: str
    title: str
    ratio: float | None
    worth: Where
    settings: Settings
    change: dict[str, Any]
    items: int
    num_bytes: int | None
    command: str | None
    """With the factor's place held by {}."""

    @property
    def is_around(self) -> bool:
        return self.settings.echo_after is None


def echo_records(model: Model) -> list[AdviceRecord]:
    """A record for each insertion point, down the pipeline; those that would not help say so, at factor 1."""
    return [_record(model, point) for point in _points(model)]


def _points(model: Model) -> Iterator[_Point]:
    pipeline, present = model.pipeline, model.present
    rows = max(1, round(pipeline.batch_size))
    inside = "in the workers" if pipeline.overlaps else "in the loader"
    stages = insertion_stages(model) if pipeline.is_map_style else []
    before = [stage for stage in fixed_stages(stages) if stage is not stages[-1]]
    for stage in stages:
        items = _room(rows * DEFAULT_BATCHES, stage.item_bytes, at_least=rows * max(1, pipeline.num_workers))
        yield _Point(
            where=stage.name,
            title=f'after "{stage.name}", {inside}: EchoDataLoader(factor={{}}, echo_after="{stage.name}")',
            ratio=_ratio_after(model, stage),
            worth="before" if stage in before else "after",
            settings=replace(present, echo_after=stage.name),
            change={"echo_after": stage.name},
            items=items,
            num_bytes=None if stage.item_bytes is None else int(items * stage.item_bytes),
            command=None,
        )
    ratio = pipeline.ratio if math.isfinite(pipeline.ratio) else None
    batch_bytes = pipeline.batch_bytes
    if pipeline.can_be_echoed_by_example:
        row_bytes = None if batch_bytes is None else batch_bytes // rows
        # The pool has a batch of slots more than residents (echo/buffer.py).
        slot_bytes = None if row_bytes is None else row_bytes + SLOT_BYTES
        items = _room((DEFAULT_BATCHES + 1) * rows, slot_bytes, at_least=2 * rows) - rows
        yield _Point(
            where="examples",
            title='examples after the loader: stretto.echo(loader, {}, unit="example")',
            ratio=ratio,
            worth="after",
            settings=replace(present, buffer_batches=items / rows),
            change={"unit": "example"},
            items=items,
            num_bytes=None if row_bytes is None else row_bytes * (items + rows),
            command="--echo {}",
        )
    items = _room(DEFAULT_BATCHES, batch_bytes, at_least=1)
    yield _Point(
        where="batch",
        title='batches after the loader: stretto.echo(loader, {}, unit="batch")',
        ratio=ratio,
        worth="batch",
        settings=replace(present, buffer_batches=items),
        change={"unit": "batch"},
        items=items,
        num_bytes=None if batch_bytes is None else items * batch_bytes,
        command=None if pipeline.can_be_echoed_by_example else "--echo {}",
    )


def _record(model: Model, point: _Point) -> AdviceRecord:
    fields: dict[str, Any] = {"where": point.where, "ratio": point.ratio}
    found = _choose(model, point) if point.ratio is None or point.ratio >= HELPS_FROM_R else None
    if found is None:
        ratio = "" if point.ratio is None else f": R is {point.ratio:.2g} there"
        return make_record(
            "echo",
            f"Do not echo {point.title.split(': ')[0]}{ratio}",
            "Making a fresh batch up to there is not what the updates wait for; what follows runs for every use.",
            model.predict(model.present),
            factor=1.0,
            change=point.change | {"factor": 1.0},
            **fields,
        )
    factor, prediction = found
    text = factor if isinstance(factor, str) else f"{factor:g}"
    measured = speedup_to_target(point.worth, prediction.factor, prediction.speedup)
    return make_record(
        "echo",
        "Echo " + point.title.format(f'"{text}"' if text == "auto" else text),
        _why(point, prediction, measured),
        prediction,
        change=point.change | {"factor": factor},
        factor=prediction.factor,
        buffer_items=point.items,
        buffer_bytes=point.num_bytes,
        speedup_measured=measured,
        command=point.command and point.command.format(text),
        **fields,
    )


def _choose(model: Model, point: _Point) -> tuple[Factor, Prediction] | None:
    """The smallest factor that keeps the accelerator busy, or less where its uses would be worth too little."""

    def predict(factor: Factor) -> Prediction:
        return model.predict(replace(point.settings, factor=factor))

    factors = [factor for factor in _FACTORS if factor <= point.settings.max_factor]
    found = smallest(factors, predict)
    if found is None:
        return None
    choices: list[tuple[Factor, Prediction]] = [(e, predict(e)) for e in factors if e < found[0]]
    best = max([*choices, found], key=lambda choice: _time_won(point, choice[1]))
    if point.is_around:
        auto = predict("auto")
        # A number as factor waits for a fresh batch when its turn has come; "auto" goes through bursts.
        if _time_won(point, auto) > HELPS * _time_won(point, best[1]):
            best = "auto", auto
    return best if best[1].speedup >= HELPS else None


def _time_won(point: _Point, prediction: Prediction) -> float:
    """The speed-up to a target, with uses beyond those measured worth nothing more."""
    measured = speedup_to_target(point.worth, prediction.factor, prediction.speedup)
    if measured is not None:
        return measured
    at_most = speedup_to_target(point.worth, 8.0, prediction.speedup * 8.0 / prediction.factor)
    assert at_most is not None
    return at_most


def _why(point: _Point, prediction: Prediction, measured: float | None) -> str:
    parts = []
    if point.ratio is not None:
        parts.append(f"R is {point.ratio:.2g} there: making what is kept takes that many times what a use takes.")
    parts.append(
        f"With {prediction.factor:.3g} uses of each the updates wait {100 * prediction.stall_share:.0f} % of the "
        f"time, and one takes {ms(1 / prediction.updates_per_s)}."
        if prediction.updates_per_s > 0
        else f"With {prediction.factor:.3g} uses of each the updates wait less."
    )
    if point.num_bytes is not None:
        parts.append(f"The buffer takes at most {size_text(point.num_bytes)}.")
    if measured is None:
        parts.append(f"What so many uses are worth was not {SOURCE}.")
    elif measured < HELPS:
        parts.append(f"At the worth of a use {SOURCE} it does not pay: {measured:.2f} times as soon at a target.")
    else:
        parts.append(f"At the worth of a use {SOURCE} a target comes {measured:.2f} times sooner.")
    if point.worth == "before":
        parts.append("That takes it that a later stage is random.")
    return " ".join(parts)


def _ratio_after(model: Model, stage: Stage) -> float | None:
    """R inside the workers: making what is kept, over a step or the stages that follow, whichever is slower."""
    pipeline = model.pipeline
    cpu, wait = split_service(pipeline)
    cpu_share, wait_share = before_shares(pipeline, stage.name)
    cpu_s, wait_s = float(cpu.mean()) * model.stretch, float(wait.mean())
    num_workers = max(1, pipeline.num_workers)
    t_up = (cpu_share * cpu_s + wait_share * wait_s) / num_workers
    rest = ((1 - cpu_share) * cpu_s + (1 - wait_share) * wait_s) / num_workers
    t_down = max(pipeline.t_down_s, rest) if pipeline.overlaps else pipeline.t_down_s + rest
    return t_up / t_down if t_down > 1e-9 else None


def _room(items: int, item_bytes: float | None, *, at_least: int) -> int:
    """How many are kept by default: 64 batches, at most 1 GiB."""
    if item_bytes is not None and item_bytes >= 1:
        items = min(items, int(DEFAULT_BYTES // item_bytes))
    return max(items, at_least)
