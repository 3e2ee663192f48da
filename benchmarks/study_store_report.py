"""What the runs of `study_store.py` and those of the study say: N(e) / N(1), speed-ups, and their tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fresh_examples import PAPER
from harness import Report, Spread
from study_parts import ratio
from study_store_runs import BASELINE, RATIO, TIMED, TimedRun, best_trial, echoed, title

from stretto.demo.calibrate import TOLERANCE
from stretto.study import Condition, Run, Study
from stretto.study.records import Record

COMPUTED_RATIOS = (1, 2, 4, 6, 10)
COMPUTED_FACTORS: tuple[float, ...] = (2, 3, 4, 5, 6, 8, 16)

PAPER_RATIOS: dict[float, float] = {
    factor: value for (_, factor), value in PAPER["ImageNet from cloud storage"].items()
}
PAPER_SPEEDUPS: dict[float, float] = {2: 1.80, 3: 2.43, 4: 3.06, 5: 3.25}
"""ResNet-50 on ImageNet, before augmentation, from cloud storage with R near 6."""


def repeats(study: Study, found: Sequence[Record], condition: Condition) -> list[Run]:
    """The study's runs of a condition's best trial with fresh seeds."""
    best = best_trial(study, found, condition)
    if best is None:
        return []
    return [r.run for r in found if r.task == replace(best.task, seed=r.task.seed, is_repeat=True)]


def quotient(above: Mapping[int, float], below: Mapping[int, float]) -> Spread | None:
    """Mean / mean over the seeds that both have, with the lowest and the highest of the seeds' own."""
    seeds = above.keys() & below.keys()
    if not seeds:
        return None
    own = [above[seed] / below[seed] for seed in seeds]
    return Spread(sum(above[seed] for seed in seeds) / sum(below[seed] for seed in seeds), min(own), max(own))


def by_seed(runs: Sequence[Run], name: str) -> dict[int, float]:
    """An attribute of each seed's run; of none if one missed the target."""
    if not all(one.status == "reached" for one in runs):
        return {}
    return {one.seed: getattr(one, name) for one in runs}


def fresh_ratio(runs: Sequence[Run], plain: Sequence[Run]) -> Spread | None:
    """N(e) / N(1), see `ratio`."""
    counts, without = (by_seed(some, "fresh_examples").values() for some in (runs, plain))
    return Spread(*ratio(counts, without)) if counts and without else None


def computed(ratio: Spread, factor: float, r: float) -> Spread:
    """The speed-up that N(e) / N(1) gives at R = `r`."""
    part = min(1.0, r / factor)
    return Spread(part / ratio.median, part / ratio.high, part / ratio.low)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the tables are made of."""

    timed: Sequence[TimedRun]
    study_ratios: Mapping[float, Spread]
    """N(e) / N(1) of the study, before augmentation."""

    @classmethod
    def of(cls, study: Study, timed: Sequence[TimedRun], found: Sequence[Record]) -> "Findings":
        plain = repeats(study, found, BASELINE)
        ratios = {e: fresh_ratio(repeats(study, found, echoed(e)), plain) for e in COMPUTED_FACTORS}
        return cls(timed, {e: ratio for e, ratio in ratios.items() if ratio is not None})

    @property
    def conditions(self) -> list[Condition]:
        """That were run at the store."""
        return list(dict.fromkeys(one.run.condition for one in self.timed))

    def runs(self, condition: Condition) -> list[Run]:
        """At the store."""
        return [one.run for one in self.timed if one.run.condition == condition]

    def ratio(self, condition: Condition) -> Spread | None:
        """N(e) / N(1) at the store."""
        return fresh_ratio(self.runs(condition), self.runs(BASELINE))

    def speedup(self, condition: Condition) -> Spread | None:
        """Measured at the store."""
        return quotient(by_seed(self.runs(BASELINE), "seconds"), by_seed(self.runs(condition), "seconds"))

    @property
    def reached(self) -> Spread:
        """R of each seed, as the link was set."""
        return Spread.of(list({one.run.seed: one.speeds.ratio for one in self.timed}.values()))

    @property
    def in_the_runs(self) -> Spread | None:
        """R of each seed, of its own runs: seconds of a fresh batch without echo / of an update with it."""
        t_up_s = {one.seed: one.seconds / one.updates for one in self.runs(BASELINE)}
        runs = self.runs(TIMED)
        return quotient(t_up_s, {one.seed: ms / 1000 for one, ms in zip(runs, update_ms(runs), strict=True)})

    def predicted(self, condition: Condition) -> Spread | None:
        """The speed-up by the formula, of the same runs' fresh examples; "auto" has its realised factor."""
        ratio, runs = self.ratio(condition), self.runs(condition)
        if ratio is None:
            return None
        factor = condition.factor
        if factor == "auto":
            uses = sum(one.updates for one in runs) * condition.batch_size
            factor = uses / sum(one.fresh_examples for one in runs)
        return computed(ratio, factor, self.reached.median)

    def computed_ratio(self, factor: float) -> Spread | None:
        """N(e) / N(1) for the computed rows: the study's, else that at the store."""
        return self.study_ratios.get(factor) or self.ratio(echoed(factor))


def update_ms(runs: Sequence[Run]) -> list[float]:
    """Milliseconds of an update without the waits: the step, drawing and, before augmentation, augmenting."""
    return [1000 * (one.seconds - one.wait_s) / one.updates for one in runs]


def stall_percent(runs: Sequence[Run]) -> list[float]:
    """Time waited for the store / total time."""
    return [100 * one.wait_s / one.seconds for one in runs]


def tables(findings: Findings) -> str:
    """Both tables in Markdown: what was measured at the store, and the speed-ups at each R."""
    return f"{measured_table(findings)}\n\n{ratio_table(findings)}"


def measured_table(findings: Findings) -> str:
    """Means over the seeds, with the lowest and the highest seed's speed-up."""
    lines = [
        f"| store with R = {_span(findings.reached)} | fresh examples | updates | ms an update | seconds "
        "| waits, % | N(e) / N(1) | speed-up | by the formula | paper: N(e) / N(1), speed-up |",
        "|---|" + "---:|" * 9,
    ]
    for condition in findings.conditions:
        runs = findings.runs(condition)
        cells = [
            title(condition),
            f"{statistics.mean(one.fresh_examples for one in runs):,.0f}",
            f"{statistics.mean(one.updates for one in runs):,.0f}",
            f"{statistics.mean(update_ms(runs)):.1f}",
            f"{statistics.mean(one.seconds for one in runs):.1f}",
            f"{statistics.mean(stall_percent(runs)):.0f}",
        ]
        ratio, speedup = findings.ratio(condition), findings.speedup(condition)
        predicted = findings.predicted(condition)
        if condition == BASELINE:
            cells += ["1", "1", "1", ""]
        elif ratio is None or speedup is None or predicted is None:
            cells += ["target missed", "", "", ""]
        else:
            cells += [f"{ratio.median:.3f}", f"**{speedup.median:.2f}** ({_span(speedup)})"]
            cells += [f"{predicted.median:.2f}", _paper_cell(condition)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_table(findings: Findings) -> str:
    """Speed-ups before augmentation for each R: computed, measured near 6, and the paper's; bold: a row's best."""
    ratios = {e: ratio for e in COMPUTED_FACTORS if (ratio := findings.computed_ratio(e)) is not None}
    at_store = {e: speedup for e in COMPUTED_FACTORS if (speedup := findings.speedup(echoed(e))) is not None}
    first = [
        f"{ratios[e].median:.3f}{'' if e in findings.study_ratios else '*'}" if e in ratios else ""
        for e in COMPUTED_FACTORS
    ]
    lines = [
        f"| R | {' | '.join(f'e = {e}' for e in COMPUTED_FACTORS)} |",
        "|---|" + "---:|" * len(COMPUTED_FACTORS),
        f"| N(e) / N(1) | {' | '.join(first)} |",
    ]
    for r in COMPUTED_RATIOS:
        lines.append(_row(f"{r}, computed", {e: computed(ratio, e, r).median for e, ratio in ratios.items()}))
        if r == RATIO:
            measured = {e: speedup.median for e, speedup in at_store.items()}
            lines.append(_row(f"{findings.reached.median:.2f}, measured", measured))
            lines.append(_row("near 6, measured in the paper with ResNet-50", PAPER_SPEEDUPS))
    lines += ["", "*) of the runs at the store; the others of the study."]
    return "\n".join(lines)


def _row(name: str, speedups: Mapping[float, float]) -> str:
    best = max([1.0, *speedups.values()])
    texts = [f"{speedups[e]:.2f}" if e in speedups else "" for e in COMPUTED_FACTORS]
    return f"| {name} | {' | '.join(f'**{text}**' if text == f'{best:.2f}' else text for text in texts)} |"


def _paper_cell(condition: Condition) -> str:
    if condition.variant != "before" or condition.factor not in PAPER_SPEEDUPS:
        return ""
    return f"{PAPER_RATIOS[condition.factor]:.3f}, {PAPER_SPEEDUPS[condition.factor]:.2f}"


def _span(spread: Spread) -> str:
    return f"{spread.low:.2f} .. {spread.high:.2f}"


def add_lines(report: Report, findings: Findings) -> None:
    """The figures of the tables, with their spreads."""
    report.add("R, as the link was set", findings.reached, "")
    if (in_the_runs := findings.in_the_runs) is not None:
        low, high = RATIO * (1 - TOLERANCE), RATIO * (1 + TOLERANCE)
        report.add("R of the runs themselves", in_the_runs, "", at_least=low, at_most=high)
    for condition in findings.conditions:
        name, runs = title(condition), findings.runs(condition)
        report.add(f"{name}, seconds", Spread.of([one.seconds for one in runs]), "s")
        report.add(f"{name}, fresh examples", Spread.of([one.fresh_examples for one in runs]), "examples")
        report.add(f"{name}, updates", Spread.of([one.updates for one in runs]), "updates")
        report.add(f"{name}, an update without waits", Spread.of(update_ms(runs)), "ms")
        report.add(f"{name}, waits", Spread.of(stall_percent(runs)), "%")
        for what, value in (
            ("speed-up", findings.speedup(condition)),
            ("by the formula", findings.predicted(condition)),
        ):
            if condition != BASELINE and value is not None:
                report.add(f"{name}, {what}", value, "x")
    for factor in COMPUTED_FACTORS:
        if (ratio := findings.computed_ratio(factor)) is None:
            continue
        source = "study" if factor in findings.study_ratios else "at the store"
        report.add(f"e = {factor}, N(e) / N(1), {source}", ratio, "")
        for r in COMPUTED_RATIOS:
            report.add(f"e = {factor}, computed speed-up at R = {r}", computed(ratio, factor, r), "x")
