"""What a study's rows come to, in a sentence, and what to do next."""

from collections.abc import Sequence

from stretto.study.conditions import Condition
from stretto.study.points import at_edge
from stretto.study.rows import Row
from stretto.study.study import Study


def verdict(study: Study, rows: Sequence[Row], *, is_done: bool) -> str:
    """The first line of a report."""
    target = study.goal
    if not is_done:
        return "Not finished: some runs are still to be made."
    if all(row.fresh_examples is None for row in rows):
        return _never_reached(study, rows)
    compared = [row for row in rows if row.ratio is not None]
    if not compared:
        return _nothing_to_compare(study, rows)
    best = _clear_best(rows)
    if best is not None:
        base = _baseline_of(best, rows)
        assert best.fresh_examples is not None
        assert base.fresh_examples is not None
        said = (
            f"{_sentence(best.title)} reaches {target} with {best.ratio:.2f} of the fresh examples of no echo: "
            f"{best.fresh_examples.mean:,.0f} instead of {base.fresh_examples.mean:,.0f}"
        )
        has_range = sum(best.repeats.values()) > 1
        return f"{said}." if has_range else f"{said}, with one seed each, which may be chance."
    if all(_is_below(_baseline_of(row, rows), row) for row in compared):
        return f"Every condition needs more fresh examples to {target} than no echo."
    return f"No condition clearly needs fewer fresh examples to {target} than no echo: the seeds' ranges overlap."


def next_step(study: Study, rows: Sequence[Row]) -> str:
    """The last line of a report."""
    if all_failed(rows):
        if any(row.trials["crashed"] for row in rows):
            return "Next: mend what crashes, then the same command with --retry-crashed."
        return "Next: lower learning rates, or another metric, with another --storage."
    if all(row.fresh_examples is None for row in rows):
        return "Next: another target, a larger max_fresh_examples or wider ranges, with another --storage."
    if all(row.ratio is None for row in rows):
        return "Next: a target that no echo and a condition beside it reach with every seed."
    best = _clear_best(rows)
    if best is None and any(row.params is not None and at_edge(study, row.params) for row in rows):
        return (
            "Next: more --trials, which add to those that are made. If the best stay at an end named above, widen "
            "that range, with another --storage."
        )
    if best is None:
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


def all_failed(rows: Sequence[Row]) -> bool:
    """Whether no run went to its end: all crashed or diverged."""
    trials = [row.trials for row in rows]
    went = any(counts["reached"] or counts["missed"] for counts in trials)
    return not went and any(counts["diverged"] or counts["crashed"] for counts in trials)


def _never_reached(study: Study, rows: Sequence[Row]) -> str:
    found = [row for row in rows if row.best_value is not None]
    if all_failed(rows):
        diverged, crashed = (sum(row.trials[status] for row in rows) for status in ("diverged", "crashed"))
        return f"No run went to its end: {crashed} trials crashed, {diverged} diverged."
    if not found:
        return f"The target, {study.goal}, was never reached: no run gave a single value."
    best = (max if study.higher_is_better else min)(found, key=lambda row: row.best_value or 0.0)
    value = f"best value {best.best_value:.4g}, with {best.title}"
    if any(row.trials["reached"] for row in rows):
        return f"The target, {study.goal}, was reached by trials, but by no repeat of the best: {value}."
    budget = f"within {study.max_fresh_examples:,} fresh examples"
    return f"The target, {study.goal}, was never reached {budget}: {value}."


def _nothing_to_compare(study: Study, rows: Sequence[Row]) -> str:
    is_baseline = [row.condition.variant == "none" for row in rows]
    if all(is_baseline):
        return f"Nothing to compare: no echo was run alone. It reaches {study.goal} as the table says."
    if not any(is_baseline):
        return 'Nothing to compare: no echo was not run. Add "none" to the variants.'
    return f"Nothing to compare: {study.goal} was not reached by all repeats of no echo and of another condition."


def _clear_best(rows: Sequence[Row]) -> Row | None:
    """The condition of the smallest ratio among those of which every seed needs less than any without echo."""
    clear = [row for row in rows if row.ratio is not None and _is_below(row, _baseline_of(row, rows))]
    return min(clear, key=lambda row: row.ratio or 0.0, default=None)


def _is_below(row: Row, other: Row) -> bool:
    assert row.fresh_examples is not None
    assert other.fresh_examples is not None
    return row.fresh_examples.high < other.fresh_examples.low


def _baseline_of(row: Row, rows: Sequence[Row]) -> Row:
    wanted = Condition.baseline(row.condition.batch_size)
    return next(other for other in rows if other.condition == wanted)


def _sentence(title: str) -> str:
    return title[:1].upper() + title[1:]
