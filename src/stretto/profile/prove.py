"""Whether a change made updates quicker: pairs of runs without and with it, and how sure that is.

Each pair gives a ratio of seconds per update, without / with. The machine's load drifts, so the two runs of a pair
are neighbours in time and the pairs alternate in order. The interval is a bootstrap of the median over the pairs.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.launch.options import RunOptions
from stretto.profile.compare import has_training, slowest
from stretto.profile.schema import AdviceRecord, RunRecord

_PAIRS_FOR_95 = 5
"""The interval of n ratios is at most all of them, which holds the median in 1 - 2^(1 - n) of cases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the interval includes it."""
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two runs of the command."""

    without: RunRecord
    with_change: RunRecord
    metric_without: float | None = None
    metric_with: float | None = None
    """What the script's output says; None where it was not asked for."""

    @property
    def ratio(self) -> float:
        """Of seconds per update, without / with: the speed-up."""
        return slowest(self.without)["s_per_update"] / slowest(self.with_change)["s_per_update"]

    @property
    def command_ratio(self) -> float:
        """Of the whole command's seconds."""
        return self.without["seconds"] / self.with_change["seconds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """The metric over the pairs."""

    mean_without: float
    mean_with: float
    difference: Estimate
    """Mean of with - without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What the pairs show."""

    verdict: str
    speedup: Estimate
    """Median ratio of seconds per update."""
    command_speedup: Estimate
    """Median ratio of the command's seconds, with its start and end."""
    quality: Quality | None
    notes: list[str]
    """What it does not show."""


def prove(pairs: Sequence[Pair], options: RunOptions) -> Proof:
    """Judge at least two pairs, whose runs with the change had `options`."""
    speedup = estimate([pair.ratio for pair in pairs], np.median)
    quality = _quality(pairs)
    return Proof(
        verdict=_verdict(speedup, len(pairs)),
        speedup=speedup,
        command_speedup=estimate([pair.command_ratio for pair in pairs], np.median),
        quality=quality,
        notes=_notes(pairs, options, quality),
    )


def estimate(values: Sequence[float], statistic: Callable[..., Any]) -> Estimate:
    """A statistic of the values with its bootstrap interval: percentiles over resampled values, reproducible."""
    from scipy.stats import bootstrap  # noqa: PLC0415  (takes a while to import)

    found = bootstrap((values,), statistic, method="percentile", random_state=np.random.default_rng(0))
    interval = found.confidence_interval
    return Estimate(value=float(statistic(values)), low=float(interval.low), high=float(interval.high))


def check_run(record: RunRecord, first: RunRecord | None) -> None:
    """Raise ValueError if a run holds no training, or not as many updates as the first one."""
    if not has_training(record):
        raise ValueError(f"no training was recognised in a run: {record['verdict']}")
    if first is None:
        return
    before, now = ([rank["updates"] for rank in each["ranks"]] for each in (first, record))
    if before != now:
        counts = " and ".join(" + ".join(f"{count:,}" for count in counts) for counts in (before, now))
        raise ValueError(
            f"two runs made different numbers of updates, {counts}: times are compared at equal updates. Make the "
            "script end after a number of updates, not of seconds or at a target, or give --steps N"
        )


def first_to_try(record: RunRecord) -> AdviceRecord | None:
    """The first advice that can be tried on the unchanged script."""
    return next((advice for advice in record["advice"] if advice["command"] is not None), None)


def why_nothing_to_try(record: RunRecord) -> str:
    """A sentence on a record without such advice."""
    if record["advice"]:
        first = record["advice"][0]
        return f"The advice, {first['title']!r}, needs a change of the script. {first['why']}"
    return record["verdict"]


def metric_pattern(text: str) -> re.Pattern[str]:
    """Of --metric. Raises ValueError unless it is a regular expression with one group."""
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise ValueError(f"--metric {text!r} is no regular expression: {error}") from error
    if pattern.groups != 1:
        raise ValueError(
            f"--metric {text!r} has {pattern.groups} groups, expected one around the number, as in "
            "'accuracy ([0-9.]+)'"
        )
    return pattern


def last_metric(pattern: re.Pattern[str], output: str) -> float:
    """The number of the last match. Raises ValueError if nothing matches, or what does is no number."""
    found = [match[1] for match in pattern.finditer(output)]
    if not found:
        raise ValueError(f"--metric {pattern.pattern!r} matches nothing in the script's output")
    try:
        value = float(found[-1])
    except (TypeError, ValueError):  # a group that took no part in the match is None
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"--metric {pattern.pattern!r} found {found[-1]!r} in the output, expected a number")
    return value


def to_text(options: RunOptions) -> str:
    """As options of the command line: "--echo 3 --workers 4"."""
    named = {"echo": options.echo, "workers": options.workers, "prefetch": options.prefetch}
    return " ".join(
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
        for name, value in named.items()
        if value is not None
    )


def _verdict(speedup: Estimate, num_pairs: int) -> str:
    numbers = f"{speedup.value:.2f}x ({speedup.low:.2f} .. {speedup.high:.2f})"
    if speedup.holds(1.0):
        return f"no proven win: {numbers}"
    if num_pairs < _PAIRS_FOR_95:
        return f"not proven by {num_pairs} pairs: {numbers}"
    return f"{'proven' if speedup.low > 1 else 'slower'}: {numbers}"


def _quality(pairs: Sequence[Pair]) -> Quality | None:
    without = [pair.metric_without for pair in pairs if pair.metric_without is not None]
    with_change = [pair.metric_with for pair in pairs if pair.metric_with is not None]
    if not without:
        return None
    differences = [b - a for a, b in zip(without, with_change, strict=True)]
    return Quality(
        mean_without=float(np.mean(without)),
        mean_with=float(np.mean(with_change)),
        difference=estimate(differences, np.mean),
    )


def _notes(pairs: Sequence[Pair], options: RunOptions, quality: Quality | None) -> list[str]:
    notes = []
    if options.echo is not None:
        notes.append("An echo repeats examples, so a quicker update is not yet a better model.")
        if quality is None:
            notes.append("Whether quality held is unknown: give --metric.")
        loaders = [loader for rank in pairs[0].with_change["ranks"] for loader in rank["loaders"]]
        reasons = {loader["why_not_echoed"]: None for loader in loaders if loader["why_not_echoed"] is not None}
        notes += [f"A training loader was not echoed: {reason}" for reason in reasons]
    if len(pairs) < _PAIRS_FOR_95:
        percent = 100 * (1 - 2.0 ** (1 - len(pairs)))
        notes.append(
            f"The intervals of {len(pairs)} pairs hold the true median in {percent:.0f} % of cases at most, not in "
            f"95 %: --pairs {_PAIRS_FOR_95} or more."
        )
    return notes
