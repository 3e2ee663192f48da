"""What a study says of one condition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.study.conditions import Condition


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
