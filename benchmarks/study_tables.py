"""The study's tables in Markdown, from the files of its runs, beside the paper's figures."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from study_figures import Line, line_chart
from study_parts import (
    FACTORS,
    IMAGES,
    LARGE,
    LOAD,
    LONG,
    MORE,
    QUALITY,
    RULES,
    SIZE,
    SIZES,
    WORKLOADS,
    Part,
    baseline,
    buffers,
    condition,
    ratio,
    sizes,
    variants,
)

from stretto.study import Condition, Outcome, Study
from stretto.study.conditions import TITLES
from stretto.study.points import at_edge
from stretto.study.report import markdown_table, spread
from stretto.study.rows import Spread

NAMES = {
    "resnet_fashion": "ResNet, Fashion-MNIST",
    "photographs": "ResNet, JPEG photographs",
    "detector": "SSD, composed scenes",
    "text_wordnet": "Transformer, WordNet",
    "text_linux": "Transformer, Linux docs",
}
PAPERS_RATIOS = {
    "LM1B": {"batch": 0.684, "after": 0.516},
    "Common Crawl": {"batch": 0.585, "after": 0.581},
    "CIFAR-10": {"batch": 0.848, "after": 0.658, "before": 0.576},
    "ImageNet": {"batch": 1.05, "after": 0.824, "before": 0.515},
    "COCO": {"batch": 0.873, "after": 0.664, "before": 0.537},
}
"""Fresh examples at e = 2 over those without echo: table and figures of arXiv 1907.05550."""
KIN = dict(zip(WORKLOADS, ("CIFAR-10", "ImageNet", "COCO", "LM1B", "Common Crawl"), strict=True))
"""Which of the paper's workloads is of the kind of ours."""
PAPERS_FACTORS = {
    "LM1B, batch 1024": {2: 0.516, 4: 0.312, 8: 0.347, 16: 0.392},
    "LM1B, batch 4096": {2: 0.565, 4: 0.290, 8: 0.191, 16: 0.175},
}
"""Example echoing."""


@dataclass(frozen=True, slots=True)
class Results:
    """What the runs of all parts say."""

    outcomes: Mapping[tuple[str, Condition], Outcome]
    """By the part's name and the condition."""
    studies: Mapping[str, Study]

    @classmethod
    def load(cls, wanted: Iterable[Part]) -> "Results":
        """Of what is made so far."""
        outcomes: dict[tuple[str, Condition], Outcome] = {}
        studies = {}
        for part in wanted:
            if (study := part.study()) is not None:
                studies[part.name] = study
                outcomes |= {(part.name, outcome.condition): outcome for outcome in part.outcomes(study)}
        return cls(outcomes, studies)

    def fresh_examples(self, part: str, condition: Condition) -> list[int] | str:
        """To the target, of each seed; a reason where there are none to compare."""
        outcome = self.outcomes.get((part + MORE, condition)) or self.outcomes.get((part, condition))
        if outcome is None or not outcome.trials:
            return "not run"
        if not outcome.is_done:
            return "not finished"
        reached = [run.fresh_examples for run in outcome.repeats if run.status == "reached"]
        if len(reached) < len(outcome.repeats) or not reached:
            return f"{len(reached)} of {len(outcome.repeats)} seeds reach it"
        return reached

    def quotients(self, part: str, condition: Condition, base: tuple[str, Condition] | None = None) -> Spread | str:
        """N(e) / N(1), see `ratio`."""
        found = self.fresh_examples(part, condition)
        of_base = self.fresh_examples(*(base or (part, Condition.baseline(condition.batch_size))))
        if isinstance(found, str):
            return found
        if isinstance(of_base, str):
            return f"without echo {of_base}"
        return Spread(*ratio(found, of_base))

    def ratio(self, part: str, condition: Condition, base: tuple[str, Condition] | None = None) -> str:
        """The same as text."""
        found = self.quotients(part, condition, base)
        return found if isinstance(found, str) else spread(found, 2)

    def final(self, part: str, condition: Condition) -> str:
        """The metric at the budget, with as many decimals as tell about four digits."""
        outcome = self.outcomes.get((part, condition))
        finals = [] if outcome is None else [run.final for run in outcome.repeats if run.final is not None]
        if outcome is None or not outcome.is_done or len(finals) < len(outcome.repeats):
            return "not run"
        largest = max(map(abs, finals))
        return spread(Spread.of(finals), 3 if largest < 10 else 1)


def workloads_table(results: Results) -> str:
    """What is trained, to which target, and what it needs without echo."""
    rows = []
    for workload in WORKLOADS:
        study, found = results.studies[workload], results.fresh_examples(workload, baseline(workload))
        every = importlib.import_module(f"workloads.{workload}").EVALUATE_EVERY
        cells = [NAMES[workload], study.goal, f"{study.batch_size}", f"{study.max_fresh_examples:,}", f"{every:,}"]
        without = found if isinstance(found, str) else spread(Spread.of(found))
        # N lies half a step of evaluations before where it is seen; a step is of 1 / e as many fresh examples.
        favour = "-" if isinstance(found, str) else f"{every / 2 * (1 - 1 / 4) * len(found) / sum(found):.2f}"
        rows.append([*cells, without, favour])
    titles = ("workload", "target", "batch", "budget", "evaluated every", "N(1)", "favour to e = 4")
    return markdown_table([titles, *rows])


def quick_table(results: Results, workloads: Iterable[str]) -> str:
    """e = 2 beside no echo, one seed."""
    rows = []
    for workload in workloads:
        variant = variants(workload)[-1]
        paper = PAPERS_RATIOS[KIN[workload]][variant]
        one = condition(workload, variant, 2)
        rows.append(
            [NAMES[workload], TITLES[variant], results.ratio(workload, one), f"{paper:g} ({KIN[workload]})"]
        )
    return markdown_table([("workload", "e = 2", "N(2) / N(1)", "paper"), *rows])


def summary_table(results: Results) -> str:
    """Every example twice and four times, at the last insertion point of each workload."""
    rows = []
    for workload in WORKLOADS:
        four = condition(workload, variants(workload)[-1], 4)
        ratios = [results.ratio(workload, replace(four, factor=factor)) for factor in (2, 4)]
        finals = results.final(f"{workload}-{QUALITY}", baseline(workload)), results.final(workload, four)
        rows.append([NAMES[workload], *ratios, results.studies[workload].metric, *finals])
    titles = ("", "fresh examples, e = 2", "e = 4", "metric", "after the same fresh examples, no echo", "e = 4")
    return markdown_table([titles, *rows])


def insertion_table(results: Results) -> str:
    """e = 2 at all insertion points."""
    rows = []
    for workload in WORKLOADS:
        cells = [NAMES[workload]]
        for variant in ("batch", "after", "before"):
            if variant not in variants(workload):
                cells.append("-")
                continue
            paper = PAPERS_RATIOS[KIN[workload]][variant]
            chosen = [condition(workload, variant, 2)]
            if variant == "batch":
                chosen.insert(0, condition(workload, variant, 2, buffer=1))
            cells.append("; ".join(results.ratio(workload, one) for one in chosen) + f"; paper {paper:g}")
        rows.append([*cells, KIN[workload]])
    titles = ("workload", "batch echoing: unshuffled; buffer of 16", TITLES["after"], TITLES["before"], "paper's")
    return markdown_table([titles, *rows])


def factors_table(results: Results) -> str:
    """e = 2 to 16 at two batch sizes."""
    rows = []
    for workload, large in LARGE.items():
        variant = variants(workload)[-1]
        for batch_size in (None, large):
            file = f"{workload}-{LONG}" if batch_size else workload
            chosen = [condition(workload, variant, factor, batch_size=batch_size) for factor in FACTORS]
            name = f"{NAMES[workload]}, batch {chosen[0].batch_size}"
            rows.append([name, *(results.ratio(file, one) for one in chosen)])
    for name, ratios in PAPERS_FACTORS.items():
        rows.append([f"paper: {name}", *(f"{ratios[factor]:g}" for factor in FACTORS)])
    rows.append(["ideal, 1 / e", *(f"{1 / factor:.3g}" for factor in FACTORS)])
    return markdown_table([("", *(f"e = {factor}" for factor in FACTORS)), *rows])


def sizes_table(results: Results) -> str:
    """Batch and example echoing at e = 2, by batch size."""
    rows = []
    file = f"resnet_fashion-{SIZE}"
    for batch_size in SIZES:
        base, examples, batches = sizes(batch_size)
        found = results.fresh_examples(file, base)
        without = found if isinstance(found, str) else spread(Spread.of(found))
        rows.append([f"{batch_size}", without, results.ratio(file, batches), results.ratio(file, examples)])
    titles = ("batch size", "N(1)", "batch echoing, unshuffled", TITLES["before"])
    return markdown_table([titles, *rows])


def buffers_table(results: Results) -> str:
    """Shuffle buffers at e = 2."""
    rows = []
    for workload in LARGE:
        main = [condition(workload, variant, 2) for variant in ("batch", variants(workload)[-1])]
        chosen = sorted(
            {*buffers(workload), *main},
            key=lambda one: (one.variant != "batch", one.buffer_batches),
        )
        for one in chosen:
            cells = NAMES[workload], TITLES[one.variant], f"{one.buffer_batches}"
            rows.append([*cells, results.ratio(workload, one)])
    return markdown_table([("workload", "echo", "buffer, batches", "N(2) / N(1)"), *rows])


def quality_table(results: Results) -> str:
    """The metric at an equal number of fresh examples, e = 4."""
    rows = []
    for workload in WORKLOADS:
        study, base = results.studies[workload], baseline(workload)
        cells = [f"{NAMES[workload]}, {study.metric}", f"{study.max_fresh_examples:,}"]
        cells += [results.final(f"{workload}-{QUALITY}", base), results.final(workload, base)]
        for variant in ("batch", "after", "before"):
            is_there = variant in variants(workload)
            cells.append(results.final(workload, condition(workload, variant, 4)) if is_there else "-")
        rows.append(cells)
    none = "no echo, settings best for the metric", "no echo, settings best for N"
    titles = ("workload, metric", "fresh examples", *none, *(TITLES[v] for v in ("batch", "after", "before")))
    return markdown_table([titles, *rows])


def fours_table(results: Results) -> str:
    """Fresh examples at e = 4."""
    rows = []
    for workload in WORKLOADS:
        chosen = [condition(workload, variant, 4) for variant in variants(workload)]
        if workload in IMAGES:
            chosen.append(condition(workload, "before", 4, buffer=4))
        cells = [results.ratio(workload, one) for one in chosen]
        rows.append([NAMES[workload], *cells, *["-"] * (4 - len(cells))])
    last = f"{TITLES['before']}, buffer of 4"
    return markdown_table(
        [("workload", *(TITLES[variant] for variant in ("batch", "after", "before")), last), *rows]
    )


def rates_table(results: Results) -> str:
    """Does the learning rate of no echo do at e = 4?"""
    rows = []
    for workload in LARGE:
        for variant in variants(workload):
            one = condition(workload, variant, 4)
            base = workload, baseline(workload)
            cells = [
                results.ratio(Part(workload=workload, conditions=(), change=rule).name, one, base) for rule in RULES
            ]
            rows.append([NAMES[workload], TITLES[variant], *cells, results.ratio(workload, one)])
    return markdown_table([("workload", "echo, e = 4", *RULES, "re-tuned, 3 trials"), *rows])


def auto_table(results: Results) -> str:
    """ "auto" under a load that floats between R = 2 and 6, and the fixed factor 4."""
    rows = []
    for workload in LARGE:
        variant = variants(workload)[-1]
        base = workload, baseline(workload)
        for file, factor in ((f"{workload}-{LOAD}", "auto"), (workload, 4)):
            one = condition(workload, variant, factor)
            outcome = results.outcomes.get((file, one))
            reached = [] if outcome is None else [run for run in outcome.repeats if run.status == "reached"]
            uses = [run.updates * one.batch_size / run.fresh_examples for run in reached]
            cells = NAMES[workload], '"auto"' if factor == "auto" else f"fixed {factor}", spread(Spread.of(uses), 2)
            rows.append([*cells, results.ratio(file, one, base), results.final(file, one)])
    titles = ("workload", "factor", "uses of an example to the target", "N(e) / N(1)", "metric at the budget")
    return markdown_table([titles, *rows])


def workers_table(results: Results) -> str:
    """Echo in the pool with augment behind it, and echo in the workers."""
    rows = []
    for workload in IMAGES[:2]:
        for factor in (2, 4):
            chosen = [condition(workload, variant, factor) for variant in ("before", "workers")]
            rows.append([NAMES[workload], f"{factor}", *(results.ratio(workload, one) for one in chosen)])
    return markdown_table([("workload", "e", "in the pool", "in the workers"), *rows])


def edges_table(results: Results) -> str:
    """Where the best trial is at an end of what was searched."""
    rows = []
    for workload in WORKLOADS:
        study = results.studies[workload]
        done = [o for (file, _), o in results.outcomes.items() if file == workload and o.best is not None]
        found = [
            f"{outcome.condition.title.removesuffix(f', batch {study.batch_size}')} ({', '.join(names)})"
            for outcome in done
            if (
                names := [
                    edge.split(" ", 1)[0] for edge in at_edge(study, outcome.trials[outcome.best or 0].params)
                ]
            )
        ]
        rows.append([NAMES[workload], f"{len(found)} of {len(done)}", "; ".join(found) or "-"])
    return markdown_table([("workload", "conditions", "which, and what"), *rows])


TABLES: Mapping[str, Callable[[Results], str]] = {
    "summary": summary_table,
    "workloads": workloads_table,
    "insertion": insertion_table,
    "fours": fours_table,
    "factors": factors_table,
    "sizes": sizes_table,
    "buffers": buffers_table,
    "quality": quality_table,
    "rates": rates_table,
    "auto": auto_table,
    "workers": workers_table,
    "edges": edges_table,
}
"""By the name in a page's marks."""
PAGES = {"README.md": ("summary",), "docs/evidence.md": tuple(TABLES)}
FIGURE = "docs/factors.svg"


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Put each table between its marks. Raises ValueError for one without marks."""
    for name, table in tables.items():
        start, end = f"<!-- study: {name} -->\n", "<!-- end -->"
        if start not in page:
            raise ValueError(f"the page has no line {start.strip()!r}")
        before, rest = page.split(start)
        page = f"{before}{start}{table}\n{end}{rest.split(end, 1)[1]}"
    return page


def figure(results: Results) -> str:
    """Fresh examples over those without echo, by factor, as an SVG document."""
    lines = []
    for workload, large in LARGE.items():
        variant = variants(workload)[-1]
        for batch_size in (None, large):
            file = f"{workload}-{LONG}" if batch_size else workload
            chosen = {factor: condition(workload, variant, factor, batch_size=batch_size) for factor in FACTORS}
            found = {float(factor): results.quotients(file, one) for factor, one in chosen.items()}
            points = {factor: value.mean for factor, value in found.items() if isinstance(value, Spread)}
            if points:
                lines.append(Line(f"{NAMES[workload]}, {chosen[2].batch_size}", {1.0: 1.0, **points}))
    lines += [
        Line(f"paper: {name}", {1.0: 1.0, **ratios}, is_dashed=True) for name, ratios in PAPERS_FACTORS.items()
    ]
    lines.append(Line("ideal, 1 / e", {float(factor): 1 / factor for factor in (1, *FACTORS)}, is_dashed=True))
    return line_chart("Fresh examples to the target, over those without echo", "uses of each example, e", lines)
