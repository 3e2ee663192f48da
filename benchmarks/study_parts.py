"""What the study is made of: parts, each with some conditions of one workload, and the file that has their runs."""

import importlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from debian import cache_folder
from study_load import train_under_load

from stretto.study import Condition, Outcome, Search, Study
from stretto.study.records import Record, best_of, read
from stretto.study.search import outcome_of

RESULTS = Path(__file__).parent / "results" / "study"
IMAGES = ("resnet_fashion", "photographs", "detector")
TEXTS = ("text_wordnet", "text_linux")
WORKLOADS = IMAGES + TEXTS
LONG, SIZE, LOAD, QUALITY = "long", "size", "load", "quality"
"""Changes of a workload's study: twice the budget with rates for larger batches; the same with a target for the
largest, which have few updates; a loader whose pace floats; a target that is out of reach, so that every run goes
to the end of its budget and the settings are chosen by the metric."""
RULES = {"unchanged": 0.0, "lr / sqrt e": -0.5, "lr / e": -1.0}
"""The power of e that the learning rate which is best without echo is multiplied with."""
LARGE = {"resnet_fashion": 256, "text_wordnet": 128}
"""The second batch size of the workloads that have all factors."""
FACTORS = (2, 4, 8, 16)
MORE_SEEDS = 9
"""Where three leave too much open: no echo, and e = 4, on images."""
MORE = f"-{MORE_SEEDS}-seeds"
SIZES = (64, 128, 256, 512, 1024)
_SEEDS = 3
_BUFFER_EXAMPLES = 1024
_SIZE_TARGET = 76.0
_OUT_OF_REACH = dict(zip(WORKLOADS, (100.0, 100.0, 1.0, 0.1, 0.1), strict=True))
_LONG_LR = {"resnet_fashion": (0.02, 0.6), "text_wordnet": (0.003, 0.02)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Conditions whose runs are made alike."""

    workload: str
    conditions: tuple[Condition, ...]
    trials: int = 3
    seeds: int = _SEEDS
    to_budget: bool = False
    change: str = ""
    """What is other than in the workload's own study: LONG, SIZE, LOAD, QUALITY or one of the RULES."""
    factor: float = 1.0
    """Of the rule."""
    folder: Path = field(default=RESULTS)

    @property
    def runs(self) -> Path:
        """Where its runs are kept."""
        name = self.workload
        if self.change:
            name += "-" + self.change.replace(" / ", "-over-").replace(" ", "-")
        return self.folder / f"{name}.jsonl"

    @property
    def name(self) -> str:
        """What tells it from the other parts that have its conditions."""
        return self.runs.stem + (MORE if self.seeds == MORE_SEEDS else "")

    def study(self) -> Study | None:
        """What is trained; None as long as the learning rate without echo is not found."""
        study = workload_study(self.workload)
        if self.change in (LONG, SIZE):
            target = _SIZE_TARGET if self.change == SIZE else study.target
            budget = 2 * study.max_fresh_examples
            return replace(study, target=target, max_fresh_examples=budget, lr=_LONG_LR[self.workload])
        if self.change == QUALITY:
            return replace(study, target=_OUT_OF_REACH[self.workload])
        if self.change == LOAD:
            return replace(study, train=partial(train_under_load, study.train))
        if self.change:
            params = best_params(self.workload, self.folder)
            if params is None:
                return None
            lr = params["lr"] * self.factor ** RULES[self.change]
            return replace(study, lr=(lr, lr), decay=(params["decay"], params["decay"]))
        return study

    def search(self) -> Search | None:
        """The runs, made and to be made; None as long as there is no study."""
        study = self.study()
        if study is None:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        storage = _states(self.folder) / f"{self.runs.stem}.db"
        return Search(
            study,
            self.conditions,
            storage,
            trials=self.trials,
            seeds=self.seeds,
            runs=self.runs,
            to_budget=self.to_budget,
        )

    def outcomes(self, study: Study) -> list[Outcome]:
        """What its runs come to, as far as they are made."""
        made: dict[tuple[Condition, bool], dict[str, Record]] = {}
        for record in best_of(read(self.runs, study.fingerprint)).values():
            made.setdefault((record.task.condition, record.task.is_repeat), {})[record.task.key] = record
        return [
            outcome_of(
                study,
                condition,
                made.get((condition, False), {}),
                made.get((condition, True), {}),
                trials=self.trials,
                seeds=self.seeds,
            )
            for condition in self.conditions
        ]


def ratio(counts: Collection[float], without: Collection[float]) -> tuple[float, float, float]:
    """Of the means over the seeds, with the lowest and the highest of `counts` over the mean of `without`.

    There may be more seeds of one than of the other.
    """
    mean = fmean(without)
    return fmean(counts) / mean, min(counts) / mean, max(counts) / mean


def workload_study(workload: str) -> Study:
    """The study of one of the workloads."""
    found: Study = importlib.import_module(f"workloads.{workload}").study
    return found


def best_params(workload: str, folder: Path) -> dict[str, float] | None:
    """The settings of the best trial without echo, once all are made."""
    part = Part(workload=workload, conditions=(baseline(workload),), folder=folder)
    [outcome] = part.outcomes(workload_study(workload))
    return None if outcome.best is None else dict(outcome.trials[outcome.best].params)


def variants(workload: str) -> tuple[str, ...]:
    """Insertion points, in the order of the paper's table."""
    return ("batch", "after", "before") if workload in IMAGES else ("batch", "after")


def baseline(workload: str) -> Condition:
    """No echo, at the workload's batch size."""
    return Condition.baseline(workload_study(workload).batch_size)


def condition(
    workload: str,
    variant: Any,
    factor: float | str,
    *,
    buffer: int | None = None,
    batch_size: int | None = None,
) -> Condition:
    """At the workload's buffer and batch size, unless they are given."""
    study = workload_study(workload)
    return Condition(variant, factor, buffer or study.buffer_batches, batch_size or study.batch_size)  # type: ignore[arg-type]


def parts(folder: Path = RESULTS) -> Iterator[Part]:
    """The whole study, the most important first."""
    for workload in WORKLOADS:
        yield Part(workload=workload, conditions=(baseline(workload),), to_budget=True, folder=folder)
        conditions = tuple(condition(workload, variant, 2) for variant in variants(workload))
        yield Part(workload=workload, conditions=conditions, folder=folder)
    for workload in WORKLOADS:
        conditions = (condition(workload, variants(workload)[-1], 4),)
        yield Part(workload=workload, conditions=conditions, to_budget=True, folder=folder)
    for workload in WORKLOADS:
        conditions = tuple(condition(workload, variant, 4) for variant in variants(workload)[:-1])
        yield Part(workload=workload, conditions=conditions, to_budget=True, folder=folder)
    for workload in IMAGES:
        yield Part(workload=workload, conditions=(condition(workload, "before", 4, buffer=4),), folder=folder)
    for workload in IMAGES:
        conditions = (baseline(workload), condition(workload, "before", 4))
        yield Part(workload=workload, conditions=conditions, seeds=MORE_SEEDS, folder=folder)
    for workload in LARGE:
        conditions = tuple(condition(workload, variant, 4) for variant in variants(workload))
        for rule in RULES:
            yield Part(workload=workload, conditions=conditions, trials=1, change=rule, factor=4, folder=folder)
    for workload in WORKLOADS:
        yield Part(
            workload=workload, conditions=(baseline(workload),), change=QUALITY, to_budget=True, folder=folder
        )
    for workload in LARGE:
        conditions = tuple(condition(workload, variants(workload)[-1], factor) for factor in FACTORS[2:])
        yield Part(workload=workload, conditions=conditions, folder=folder)
    for workload in IMAGES[:2]:
        conditions = tuple(condition(workload, "workers", factor) for factor in FACTORS[:2])
        yield Part(workload=workload, conditions=conditions, folder=folder)
    for workload in LARGE:
        conditions = (condition(workload, variants(workload)[-1], "auto"),)
        yield Part(workload=workload, conditions=conditions, change=LOAD, to_budget=True, folder=folder)
    for workload in WORKLOADS:
        yield Part(workload=workload, conditions=tuple(buffers(workload)), folder=folder)
    for batch_size in SIZES:
        yield Part(workload="resnet_fashion", conditions=sizes(batch_size), change=SIZE, folder=folder)
    for workload, large in LARGE.items():
        at_large = [condition(workload, variants(workload)[-1], factor, batch_size=large) for factor in FACTORS]
        conditions = (Condition.baseline(large), *at_large)
        yield Part(workload=workload, conditions=conditions, change=LONG, folder=folder)


def sizes(batch_size: int) -> tuple[Condition, ...]:
    """No echo; e = 2 from a buffer of 1,024 examples or four batches; unshuffled batches as in the paper."""
    buffer = max(4, _BUFFER_EXAMPLES // batch_size)
    return (
        Condition.baseline(batch_size),
        condition("resnet_fashion", "before", 2, buffer=buffer, batch_size=batch_size),
        condition("resnet_fashion", "batch", 2, buffer=1, batch_size=batch_size),
    )


def buffers(workload: str) -> Sequence[Condition]:
    """Smaller and larger than the study's; the paper's batch echoing is that of one batch."""
    batches = [condition(workload, "batch", 2, buffer=1)]
    if workload not in LARGE:
        return batches
    batches.append(condition(workload, "batch", 2, buffer=100))
    example = variants(workload)[-1]
    return [*batches, *(condition(workload, example, 2, buffer=buffer) for buffer in (2, 128))]


def quick(workloads: Iterable[str], folder: Path) -> Iterator[Part]:
    """The paper's central claim in small: one trial and one seed of two conditions in each workload."""
    for workload in workloads:
        conditions = (baseline(workload), condition(workload, variants(workload)[-1], 2))
        yield Part(workload=workload, conditions=conditions, trials=1, seeds=1, folder=folder)


def _states(folder: Path) -> Path:
    """Where the searches' states are; they can be made again from the runs."""
    states = folder if folder != RESULTS else cache_folder("study")
    states.mkdir(parents=True, exist_ok=True)
    return states
