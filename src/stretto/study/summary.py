"""What the runs of a study say: for each condition its spread over the seeds, and beside no echo."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stretto.study.cause import cause
from stretto.study.conditions import TITLES, Condition
from stretto.study.points import at_edge
from stretto.study.rows import Row, Spread
from stretto.study.run import Run
from stretto.study.search import Outcome
from stretto.study.study import Study
from stretto.study.verdict import next_step, verdict

VERSION = 1


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
        verdict=verdict(study, rows, is_done=all(outcome.is_done for outcome in outcomes)),
        rows=rows,
        next_step=next_step(study, rows),
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
            last = cause(failed[-1].error or status)
            said.append(f"{len(failed)} of {len(runs)} runs {status}, the last with {last}")
    cut_short = [run for run in outcome.repeats if run.status == "reached" and run.error is not None]
    if cut_short:
        last = cause(cut_short[-1].error or "")
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
