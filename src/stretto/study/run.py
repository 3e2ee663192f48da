"""One run: a training function driven to the target, or on to the end of its budget of fresh examples."""

import math
import random
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from stretto.study.conditions import Condition
from stretto.study.loader import MakeLoader, make_loader
from stretto.study.settings import make_settings
from stretto.study.study import Study, TrainError, Value

Status = Literal["reached", "missed", "diverged", "crashed"]
OnUpdate = Callable[[int, float | None], None]
"""Called after each update with the fresh examples read so far, and the latest metric value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How one run went."""

    condition: Condition
    params: Mapping[str, float]
    """The point of the search space."""
    seed: int
    status: Status
    """"reached" is of the target; "diverged": the metric was not finite, or a FloatingPointError was raised."""
    fresh_examples: int
    """Read by the evaluation that reached the target, or in all."""
    updates: int
    """Made by then."""
    seconds: float
    """Passed by then, from the call of make_loader on, evaluations that a function makes not counted."""
    best: float | None
    """The best metric value of all."""
    final: float | None = None
    """The metric at the fixed budget of fresh examples; None where the run stopped before."""
    wait_s: float = 0.0
    """Seconds that updates waited for the loader, in the whole run."""
    au_percent: float = 0.0
    """Time in update steps / total time in percent, evaluations not counted."""
    error: str | None = None
    """The traceback of a crash, or what diverged."""

    def to_plain(self) -> dict[str, Any]:
        """As containers, numbers and strings."""
        return {**asdict(self), "params": dict(self.params)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Run":
        """What `to_plain` gave."""
        return cls(**{**plain, "condition": Condition(**plain["condition"])})


def run(
    study: Study,
    condition: Condition,
    params: Mapping[str, float],
    seed: int,
    *,
    to_budget: bool = False,
    on_update: OnUpdate | None = None,
) -> Run:
    """Train once.

    Args:
        study: what to train, and its target.
        condition: how to feed it.
        params: a value for each of the study's ranges.
        seed: of torch, NumPy and `random`, of the loader's order and of the augmentation.
        to_budget: go on behind the target to the study's fixed budget, for the final metric there.
        on_update: told how far the run is.

    What the training function raises is a crash and part of the result; TrainError is raised where it ends
    early, yields what is no number, or never asks for its loader.
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    loader = make_loader(condition, seed, has_augment=study.has_augment)
    driven = _Driven(study, loader, to_budget, on_update)
    settings = make_settings(study, condition, params, lambda: loader.fresh_examples / study.max_fresh_examples)
    loader.max_draws = settings.max_updates
    status: Status | None = None
    error: str | None = None
    try:
        updates = study.train(settings, loader, seed)
        if not isinstance(updates, Iterable):
            raise TrainError(
                f"train returned {updates!r} ({type(updates).__name__}): expected a generator, which yields once "
                "after each update"
            )
        try:
            driven.drive(updates)
        finally:
            if isinstance(updates, Generator):
                updates.close()
    except TrainError:
        raise
    except FloatingPointError as raised:
        status, error = "diverged", f"FloatingPointError: {raised}"
    except (Exception, SystemExit):
        status, error = "crashed", traceback.format_exc()
    finally:
        loader.close()
    if driven.at_target is not None:
        status = "reached"  # what happens on the way to the budget does not undo it
    fresh_examples, updates_made, seconds = driven.at_target or driven.now()
    wait_s, au_percent = driven.waits()
    return Run(
        condition=condition,
        params=dict(params),
        seed=seed,
        status=status or "missed",
        fresh_examples=fresh_examples,
        updates=updates_made,
        seconds=seconds,
        best=driven.best,
        final=driven.final,
        wait_s=wait_s,
        au_percent=au_percent,
        error=error,
    )


class _Driven:
    """Counts, clocks and the metric of a run."""

    def __init__(self, study: Study, loader: MakeLoader, to_budget: bool, on_update: OnUpdate | None) -> None:
        self._study = study
        self._loader = loader
        self._to_budget = to_budget
        self._on_update = on_update
        self._updates = 0
        self._measure: Callable[[], float] | None = None
        self._latest: float | None = None
        self._evaluated_s = 0.0
        self._evaluated_in_steps_s = 0.0  # before the latest batch was asked for: the loader took it for a step
        self.best: float | None = None
        self.final: float | None = None
        self.at_target: tuple[int, int, float] | None = None

    def drive(self, updates: Iterable[Value]) -> None:
        """Make updates until the run is over."""
        study, budget = self._study, self._study.evaluate_budget or self._study.max_fresh_examples
        for value in updates:
            if not self._loader.was_called:
                raise TrainError("train yielded without a batch: expected it to take its batches from make_loader")
            self._updates += 1
            self._loader.draws = 0
            self._evaluated_in_steps_s = self._evaluated_s
            fresh = self._loader.fresh_examples
            is_over = fresh >= study.max_fresh_examples
            ends_here = is_over or (self._to_budget and fresh >= budget and self.final is None)
            self._evaluate(value, ends_here)
            if ends_here and self._to_budget and self.final is None:
                self.final = self._latest
            if self._on_update is not None:
                self._on_update(fresh, self._latest)
            if is_over or (self.at_target is not None and (not self._to_budget or self.final is not None)):
                if self._latest is None:
                    raise TrainError(
                        f"train yielded no metric value in {self._updates:,} updates, the whole budget: expected a "
                        "number, or a function that returns one, from time to time"
                    )
                return
        raise TrainError(
            f"train ended after {self._updates:,} updates, with {self._loader.fresh_examples:,} fresh examples of "
            f"{study.max_fresh_examples:,}: expected it to go on as long as its loader yields"
        )

    def now(self) -> tuple[int, int, float]:
        """Fresh examples, updates and seconds so far."""
        began_s = self._loader.began_s
        seconds = 0.0 if began_s is None else time.perf_counter() - began_s - self._evaluated_s
        return self._loader.fresh_examples, self._updates, seconds

    def waits(self) -> tuple[float, float]:
        """Seconds waited for the loader, and AU in percent."""
        if not self._loader.was_called:
            return 0.0, 0.0
        stats = self._loader.stats()
        total_s = stats.total_s - self._evaluated_in_steps_s
        step_s = max(0.0, stats.step_s - self._evaluated_in_steps_s)
        return stats.wait_s, 100 * step_s / total_s if total_s > 0 else 0.0

    def _evaluate(self, value: Value, ends_here: bool) -> None:
        """Measure what was yielded; where the run ends, with the latest function if nothing was yielded."""
        if callable(value):
            self._measure = value
        elif value is None and ends_here:
            value = self._measure
        if value is None:
            return
        before = self.now()
        began_s = time.perf_counter()
        metric = self._to_number(value() if callable(value) else value)
        self._evaluated_s += time.perf_counter() - began_s
        if not math.isfinite(metric):
            raise FloatingPointError(f"{self._study.metric} is {metric} after {self._updates:,} updates")
        self._latest = metric
        if self._study.is_better(metric, self.best):
            self.best = metric
        if self.at_target is None and self._study.is_reached(metric):
            self.at_target = before

    def _to_number(self, value: object) -> float:
        if isinstance(value, torch.Tensor | np.ndarray | np.generic) and _num_elements(value) == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TrainError(
                f"train yielded {value!r} ({type(value).__name__}) as {self._study.metric}: expected None, a "
                "number, or a function that returns a number"
            )
        return float(value)


def _num_elements(value: "torch.Tensor | np.ndarray[Any, Any] | np.generic") -> int:
    return value.numel() if isinstance(value, torch.Tensor) else value.size
