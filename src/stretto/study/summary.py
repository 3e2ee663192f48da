"""What the runs of a study say: for each condition its spread over the seeds, and beside no echo."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stretto.study.conditions import TITLES, Condition
from stretto.study.points import at_edge
from stretto.study.run import Run
from stretto.study.search import Outcome
from stretto.study.study import Study

VERSION = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """A value of several seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None of no values."""
        return cls(sum(values) / len(values), min(values), max(values)) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a study says of one condition; spreads are over the repeats of its best trial."""

    condition: Condition
    title: str
    """What tells it from the study's other conditions."""
    trials: Mapping[str, int]
    """How many trials there are of each status."""
    repeats: Mapping[str, int]
    """How many repeats there are of each status."""
    params: Mapping[str, float] | None
    """The best trial's settings."""
    fresh_examples: Spread | None
    """To the target, of the repeats that reached it; so are updates and seconds."""
    updates: Spread | None
    seconds: Spread | None
    ratio: float | None
    """N(e) / N(1), of means; None unless all repeats of both reached the target."""
    ideal: float | None
    """1 / e."""
    final: Spread | None
    """The metric at the fixed budget of fresh examples, of the repeats that went on to it."""
    num_final: int
    """How many repeats did."""
    best_value: float | None
    """The best metric value of all runs."""
    au_percent: Spread | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A study's verdict, evidence and next step."""

    study: Study
    verdict: str
    rows: tuple[Row, ...]
    next_step: str
    outcomes: tuple[Outcome, ...]

    def to_plain(self) -> dict[str, Any]:
        """As containers, numbers and strings."""
        rows = []
        for row, outcome in zip(self.rows, self.outcomes, strict=True):
            runs = [run.to_plain() for run in outcome.trials], [run.to_plain() for run in outcome.repeats]
            rows.append({**asdict(row), "is_done": outcome.is_done, "trial_runs": runs[0], "repeat_runs": runs[1]})
        return {
            "version": VERSION,
            "verdict": self.verdict,
            "next_step": self.next_step,
            "study": self.study.fingerprint,
            "conditions": rows,
        }


def summarise(study: Study, outcomes: Sequence[Outcome]) -> Report:
    """What the runs that are made say."""
    is_reached_by_all = {
        outcome.condition: bool(outcome.repeats) and all(run.status == "reached" for run in outcome.repeats)
        for outcome in outcomes
    }
    means = {
        outcome.condition: sum(run.fresh_examples for run in outcome.repeats) / len(outcome.repeats)
        for outcome in outcomes
        if is_reached_by_all[outcome.condition]
    }
    titles = _titles([outcome.condition for outcome in outcomes])
    rows = tuple(_row(study, outcome, title, means) for outcome, title in zip(outcomes, titles, strict=True))
    return Report(
        study=study,
        verdict=_verdict(study, rows, outcomes),
        rows=rows,
        next_step=_next_step(study, rows),
        outcomes=tuple(outcomes),
    )


def _row(study: Study, outcome: Outcome, title: str, means: Mapping[Condition, float]) -> Row:
    condition, repeats = outcome.condition, outcome.repeats
    reached = [run for run in repeats if run.status == "reached"]
    values = [run.best for run in (*outcome.trials, *repeats) if run.best is not None]
    params = None if outcome.best is None else outcome.trials[outcome.best].params
    baseline = Condition.baseline(condition.batch_size)
    finals = [run.final for run in repeats if run.final is not None]
    has_ratio = condition != baseline and condition in means and baseline in means
    return Row(
        condition=condition,
        title=title,
        trials=_count(outcome.trials),
        repeats=_count(repeats),
        params=params,
        fresh_examples=Spread.of([run.fresh_examples for run in reached]),
        updates=Spread.of([run.updates for run in reached]),
        seconds=Spread.of([run.seconds for run in reached]),
        ratio=means[condition] / means[baseline] if has_ratio else None,
        ideal=None if condition.factor == "auto" else 1 / condition.factor,
        final=Spread.of(finals),
        num_final=len(finals),
        best_value=(max if study.higher_is_better else min)(values) if values else None,
        au_percent=Spread.of([run.au_percent for run in repeats]),
        warnings=_warnings(study, outcome, params),
    )


def _warnings(study: Study, outcome: Outcome, params: Mapping[str, float] | None) -> tuple[str, ...]:
    edges = [] if params is None else at_edge(study, params)
    said = [f"the best trial's {edge}: a better one may lie beyond" for edge in edges]
    runs = (*outcome.trials, *outcome.repeats)
    for status in ("diverged", "crashed"):
        failed = [run for run in runs if run.status == status]
        if failed:
            last = (failed[-1].error or "").strip().splitlines()[-1]
            said.append(f"{len(failed)} of {len(runs)} runs {status}, the last with {last}")
    cut_short = [run for run in outcome.repeats if run.status == "reached" and run.error is not None]
    if cut_short:
        last = (cut_short[-1].error or "").strip().splitlines()[-1]
        said.append(f"{len(cut_short)} repeats failed behind the target, and have no final metric: {last}")
    return tuple(said)


def _count(runs: Sequence[Run]) -> dict[str, int]:
    counts = Counter(run.status for run in runs)
    return {status: counts[status] for status in ("reached", "missed", "diverged", "crashed")}


def _titles(conditions: Sequence[Condition]) -> list[str]:
    """What tells each from the others: buffer and batch size only where there are several."""
    buffers = {condition.buffer_batches for condition in conditions if condition.variant != "none"}
    sizes = {condition.batch_size for condition in conditions}
    found = []
    for condition in conditions:
        parts = [TITLES[condition.variant]]
        if condition.variant != "none":
            parts.append("auto" if condition.factor == "auto" else f"e = {condition.factor:g}")
            parts += [f"buffer {condition.buffer_batches}"] * (len(buffers) > 1)
        parts += [f"batch {condition.batch_size}"] * (len(sizes) > 1)
        found.append(", ".join(parts))
    return found


def _verdict(study: Study, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    target = study.goal
    num_done = sum(outcome.is_done for outcome in outcomes)
    if num_done < len(outcomes):
        return f"Not finished: {num_done} of {len(outcomes)} conditions are done."
    if all(row.fresh_examples is None for row in rows):
        found = [row for row in rows if row.best_value is not None]
        budget = f"within {study.max_fresh_examples:,} fresh examples"
        if not found:
            return f"The target, {target}, was never reached: no run gave a single value."
        best = (max if study.higher_is_better else min)(found, key=lambda row: row.best_value or 0.0)
        value = f"best value {best.best_value:.4g}, with {best.title}"
        return f"The target, {target}, was never reached {budget}: {value}."
    compared = [row for row in rows if row.ratio is not None]
    if not compared:
        return f"Nothing to compare: {target} was not reached by all repeats of no echo and of another condition."
    best_row = min(compared, key=lambda row: row.ratio or 0.0)
    base = _baseline_of(best_row, rows)
    assert best_row.fresh_examples is not None
    assert base.fresh_examples is not None
    if best_row.fresh_examples.high < base.fresh_examples.low:
        return (
            f"{_sentence(best_row.title)} reaches {target} with {best_row.ratio:.2f} of the fresh examples of no "
            f"echo: {best_row.fresh_examples.mean:,.0f} instead of {base.fresh_examples.mean:,.0f}."
        )
    return f"No condition clearly needs fewer fresh examples to {target} than no echo: the seeds' ranges overlap."


def _next_step(study: Study, rows: Sequence[Row]) -> str:
    if all(row.fresh_examples is None for row in rows):
        return "Next: another target, a larger max_fresh_examples or wider ranges, with another --storage."
    if any("is at the" in warning for row in rows for warning in row.warnings):
        return "Next: widen the ranges named above and repeat with another --storage."
    compared = [row for row in rows if row.ratio is not None]
    if not compared:
        return "Next: a target that no echo reaches with every seed."
    best = min(compared, key=lambda row: row.ratio or 0.0)
    base = _baseline_of(best, rows)
    assert best.fresh_examples is not None
    assert base.fresh_examples is not None
    if best.fresh_examples.high >= base.fresh_examples.low:
        return "Next: more --seeds, which add to those that are made; or leave it."
    condition = best.condition
    factor = '"auto"' if condition.factor == "auto" else f"{condition.factor:g}"
    if condition.variant == "batch":
        return f'Next: stretto.echo(loader, {factor}, unit="batch", buffer={condition.buffer_batches})'
    buffer = f"buffer={condition.buffer_batches * condition.batch_size}"
    augment = ", augment=augment" * (study.has_augment and condition.variant in ("before", "workers"))
    if condition.variant == "workers":
        arguments = f"dataset, {condition.batch_size}, ..., factor={factor}, {buffer}{augment}"
        return f"Next: stretto.EchoDataLoader({arguments})"
    return f"Next: stretto.echo(loader, {factor}, {buffer}{augment})"


def _baseline_of(row: Row, rows: Sequence[Row]) -> Row:
    wanted = Condition.baseline(row.condition.batch_size)
    return next(other for other in rows if other.condition == wanted)


def _sentence(title: str) -> str:
    return title[:1].upper() + title[1:]
