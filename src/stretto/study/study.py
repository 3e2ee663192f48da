"""What the user of a study gives: a training function, a target, and the ranges to search."""

import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stretto.study.cause import cause

Range = tuple[float, float]
Value = float | Callable[[], float] | None
"""What a training function yields after an update: a metric value, a function that measures one, or nothing."""
Train = Callable[..., Iterable[Value]]

_NAME = "study"  # what load_study looks for
_OWN_NAMES = ("lr", "decay")


class TrainError(ValueError):
    """The training function does not keep to what is asked of it, so that no run of it can count."""


@dataclass(frozen=True, slots=True)
class Study:
    """A training to compare conditions on. Raises TypeError or ValueError, naming the value that cannot work.

    `train(settings, make_loader, seed)` trains one model from scratch and yields once after each update; see
    `stretto.study` for an example.
    """

    train: Train
    """The training function: (Settings, MakeLoader, int) -> a generator of `Value`."""
    _: KW_ONLY
    metric: str
    """What is measured, with its unit, as tables name it."""
    target: float
    """The metric's value that ends the count of fresh examples."""
    max_fresh_examples: int
    """The budget of a run."""
    lr: Range
    """The learning rates to search, log-uniformly; equal ends fix it."""
    higher_is_better: bool = True
    batch_size: int = 128
    """Examples in a batch, where a condition does not say otherwise."""
    decay: Range = (0.25, 1.0)
    """The share of the budget's updates after which the learning rate has fallen to 1 % of itself, searched
    uniformly; equal ends fix it."""
    search: Mapping[str, Range] | None = None
    """Further settings to search, log-uniformly, by name."""
    has_augment: bool = True
    """Whether `train` hands an augmentation to make_loader; without one nothing lies behind the echo."""
    buffer_batches: int = 16
    """The echo's buffer, in batches, where a condition does not say otherwise."""
    evaluate_budget: int | None = None
    """Fresh examples at which the final metric is taken; None: all of `max_fresh_examples`."""

    def __post_init__(self) -> None:
        if not callable(self.train):
            raise TypeError(
                f"train={self.train!r}: expected the training function, train(settings, make_loader, seed)"
            )
        if not isinstance(self.metric, str) or not self.metric:
            raise TypeError(f'metric={self.metric!r}: expected its name, such as "test accuracy, %"')
        check_number("target", self.target)
        for name in ("higher_is_better", "has_augment"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: expected True or False")
        for name in ("batch_size", "max_fresh_examples", "buffer_batches"):
            check_count(name, getattr(self, name))
        if self.max_fresh_examples < self.batch_size:
            raise ValueError(
                f"max_fresh_examples={self.max_fresh_examples}: expected at least one batch, "
                f"batch_size={self.batch_size}"
            )
        if self.evaluate_budget is not None:
            check_count("evaluate_budget", self.evaluate_budget)
            if self.evaluate_budget > self.max_fresh_examples:
                raise ValueError(
                    f"evaluate_budget={self.evaluate_budget}: expected at most "
                    f"max_fresh_examples={self.max_fresh_examples}, where every run ends"
                )
        for name, bounds in self.ranges.items():
            _check_range(name, bounds)
        if self.decay[1] > 1:
            raise ValueError(f"decay={self.decay}: expected shares of the budget's updates, at most 1")
        for name in self.search or ():
            if name in _OWN_NAMES:
                raise ValueError(f"search has {name!r}, which is searched anyway: give its range as {name}=...")

    @property
    def ranges(self) -> dict[str, Range]:
        """All that is searched: lr, decay, then the names of `search` in alphabetical order."""
        return {"lr": self.lr, "decay": self.decay, **dict(sorted((self.search or {}).items()))}

    def is_log(self, name: str) -> bool:
        """Whether a range is searched log-uniformly."""
        return name != "decay"

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether one metric value is better than another; any is better than None."""
        return than is None or (value > than if self.higher_is_better else value < than)

    def is_reached(self, value: float) -> bool:
        """Whether a metric value is at the target or beyond it."""
        return value >= self.target if self.higher_is_better else value <= self.target

    @property
    def goal(self) -> str:
        """Metric and target, such as "test accuracy 85 %" of the metric "test accuracy, %"."""
        name, _, unit = self.metric.partition(", ")
        return f"{name} {self.target:g} {unit}".rstrip()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What runs that are compared must have in common, as plain values."""
        train = self.train.func if isinstance(self.train, partial) else self.train
        return {
            "train": getattr(train, "__qualname__", type(train).__name__),
            "metric": self.metric,
            "target": float(self.target),
            "higher_is_better": self.higher_is_better,
            "batch_size": self.batch_size,
            "max_fresh_examples": self.max_fresh_examples,
            "evaluate_budget": self.evaluate_budget,
            "has_augment": self.has_augment,
            "ranges": {name: [float(end) for end in bounds] for name, bounds in self.ranges.items()},
        }


def load_study(path: str | Path) -> Study:
    """The `study` of a Python file, which is run as a module.

    Raises ValueError if there is no such file or no `study` of type Study in it, RuntimeError if the file raises.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as python FILE.py does
    # A name that worker processes can import, where it is not taken.
    name = path.stem if path.stem not in sys.modules else f"stretto_study_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: expected a Python file, FILE.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RuntimeError(f"{path} fails: {cause(traceback.format_exc())}") from error
    expected = f"expected a line such as {_NAME} = stretto.study.Study(train, metric=..., target=..., ...)"
    if not hasattr(module, _NAME):
        raise ValueError(f"{path} defines no {_NAME}: {expected}")
    found = getattr(module, _NAME)
    if not isinstance(found, Study):
        raise ValueError(f"{_NAME} of {path} is a {type(found).__name__}: {expected}")
    return found


def check_number(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value}: expected a finite number")


def check_count(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless the value is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected an integer >= 1")
    if value < 1:
        raise ValueError(f"{name}={value}: expected an integer >= 1")


def _check_range(name: str, bounds: object) -> None:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise TypeError(f"{name}={bounds!r}: expected a range, (low, high)")
    for end in bounds:
        check_number(name, end)
    low, high = bounds
    if not 0 < low <= high:
        raise ValueError(f"{name}={bounds}: expected 0 < low <= high")
