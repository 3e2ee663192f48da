"""What one run trains with: a point of the search space, made into a learning rate for every update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stretto.echo.factor import default_max_factor
from stretto.study.conditions import Condition
from stretto.study.study import Study

_FLOOR = 0.01  # what is left of the learning rate in the end


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a training function gets; further names of the search are `settings["name"]`."""

    batch_size: int
    lr: float
    """The learning rate of the first update."""
    decay_updates: int
    """Updates after which the rate has fallen to 1 % of `lr`."""
    max_updates: int
    """Updates that the budget of fresh examples allows; with the factor "auto" at most."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Further settings of the search, by name."""
    spent: Callable[[], float] | None = None
    """The part of the budget that has been read, between 0 and 1, where the number of updates does not tell."""

    def rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0: `lr`, linearly down to 1 % of it, then constant."""
        done = update if self.spent is None else self.spent() * self.max_updates
        return self.lr * (1 - (1 - _FLOOR) * min(1.0, done / self.decay_updates))

    def __getitem__(self, name: str) -> float:
        try:
            return self.values[name]
        except KeyError:
            known = ", ".join(self.values) or "none"
            raise KeyError(f"{name!r} is not searched: expected a name of the study's search ({known})") from None


def make_settings(
    study: Study, condition: Condition, params: Mapping[str, float], spent: Callable[[], float]
) -> Settings:
    """The settings of a run with the point `params`, a value for each of the study's ranges.

    Under "auto" how many updates the budget allows depends on the machine's load, and so the rate goes by the
    fresh examples that were read.
    """
    if params.keys() != study.ranges.keys():
        raise ValueError(f"params are {', '.join(params)}: expected {', '.join(study.ranges)}")
    is_auto = condition.factor == "auto"
    factor = default_max_factor(condition.batch_size) if condition.factor == "auto" else condition.factor
    max_updates = max(1, round(factor * study.max_fresh_examples / condition.batch_size))
    return Settings(
        batch_size=condition.batch_size,
        lr=params["lr"],
        decay_updates=max(1, round(params["decay"] * max_updates)),
        max_updates=max_updates,
        values={name: params[name] for name in study.search or ()},
        spent=spent if is_auto else None,
    )
