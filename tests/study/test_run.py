"""One run: where it ends, what it counts, and how it fails."""

import importlib
import math
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.study import Condition, MakeLoader, Run, Settings, TrainError, run
from stretto.study.cause import cause
from tests.study.toys import BASELINE, BATCH, BEFORE, PARAMS, augment, loader_of, make_study


def yields(value: Callable[[int], Any]) -> Callable[..., Iterator[Any]]:
    """A training function that yields what `value` says of the number of updates made."""

    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[Any]:
        for update, _ in enumerate(make_loader(loader_of(settings.batch_size), augment)):
            yield value(update + 1)

    return train


def ran(value: Callable[[int], Any], condition: Any = BASELINE, to_budget: bool = False, **options: Any) -> Run:
    return run(make_study(yields(value), **options), condition, PARAMS, 0, to_budget=to_budget)


def test_a_run_ends_at_the_target_and_counts_what_it_read() -> None:
    done = ran(lambda updates: updates / 20)
    assert (done.status, done.updates, done.fresh_examples, done.best, done.final) == ("reached", 20, 80, 1.0, None)
    echoed = ran(lambda updates: updates / 20, BEFORE)
    assert (echoed.status, echoed.updates) == ("reached", 20)
    assert 20 <= echoed.fresh_examples < 60


def test_under_auto_a_run_ends_at_the_target_or_with_its_budget_too() -> None:
    auto = Condition("before", "auto", 4, 4)
    done = ran(lambda updates: updates / 20, auto)
    assert (done.status, done.updates) == ("reached", 20)
    done = ran(lambda updates: 0.5, auto)
    assert (done.status, done.fresh_examples) == ("missed", 200)
    assert 50 <= done.updates <= 8 * 50


def test_a_run_ends_with_its_budget_and_tells_its_best_value() -> None:
    done = ran(lambda updates: -abs(updates - 30) if updates % 10 == 0 else None)
    assert (done.status, done.updates, done.fresh_examples, done.best) == ("missed", 50, 200, 0)
    down = ran(lambda updates: 5 + abs(updates - 30), higher_is_better=False)
    assert (down.status, down.best) == ("missed", 5)


def test_a_repeat_goes_on_to_the_budget_and_tells_the_metric_there() -> None:
    done = ran(lambda updates: updates / 20, to_budget=True)
    assert (done.status, done.updates, done.fresh_examples) == ("reached", 20, 80)
    assert (done.final, done.best) == (50 / 20, 50 / 20)


def test_the_final_metric_may_be_taken_before_the_budget_ends() -> None:
    calls: list[int] = []

    def value(updates: int) -> float:
        calls.append(updates)
        return updates / 20

    early = ran(value, to_budget=True, evaluate_budget=160)
    assert (early.updates, early.final, calls[-1]) == (20, 40 / 20, 40)
    late = ran(value, to_budget=True, evaluate_budget=40)
    assert (late.updates, late.final, calls[-1]) == (20, 10 / 20, 20)  # it went on to the target


def test_the_metric_at_the_end_is_measured_by_the_latest_function() -> None:
    made = [0]

    def value(updates: int) -> Any:
        made[0] = updates
        return (lambda: made[0] / 100) if updates % 15 == 0 else None

    done = ran(value, to_budget=True)
    assert (done.status, done.best, done.final) == ("missed", 0.5, 0.5)  # of update 50, not of 45


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_has_diverged(value: float) -> None:
    done = ran(lambda updates: value if updates == 7 else 0.5)
    assert (done.status, done.updates, done.best, done.final) == ("diverged", 7, 0.5, None)
    assert done.error == f"FloatingPointError: skill, points is {value} after 7 updates"


def test_a_training_may_say_itself_that_it_diverged() -> None:
    def fail(updates: int) -> float:
        raise FloatingPointError("the loss is nan")

    done = ran(fail)
    assert (done.status, done.error) == ("diverged", "FloatingPointError: the loss is nan")


def test_what_is_raised_is_a_crash_with_its_traceback() -> None:
    def fail(updates: int) -> Any:
        return lambda: 1 / 0

    done = ran(fail)
    assert done.status == "crashed"
    assert done.error is not None
    assert "in fail" not in done.error
    assert "return lambda: 1 / 0" in done.error
    assert done.error.rstrip().endswith("ZeroDivisionError: division by zero")
    assert ran(lambda updates: sys.exit(3)).status == "crashed"


def test_what_fails_behind_the_target_does_not_undo_it() -> None:
    done = ran(lambda updates: math.nan if updates > 30 else updates / 20, to_budget=True)
    assert (done.status, done.updates, done.fresh_examples, done.final) == ("reached", 20, 80, None)
    assert done.error is not None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda updates: "high", r"train yielded 'high' \(str\) as skill, points: expected None, a number, or"),
        (lambda updates: lambda: None, r"train yielded None \(NoneType\)"),
        (lambda updates: True, r"train yielded True \(bool\)"),
        (lambda updates: None, "train yielded no metric value in 50 updates, the whole budget"),
    ],
)
def test_a_value_that_is_no_number_ends_the_study(value: Any, says: str) -> None:
    with pytest.raises(TrainError, match=says):
        ran(value)


def test_numbers_of_torch_and_numpy_are_numbers() -> None:
    numpy, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    for number in (numpy.float32(2), numpy.array([2.0]), torch.tensor(2.0), torch.tensor([2])):
        assert ran(lambda updates, number=number: number).best == 2.0


def test_a_training_that_ends_early_is_told_so() -> None:
    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[float]:
        for _, update in zip(make_loader(loader_of(), augment), range(9), strict=False):
            yield update / 100

    with pytest.raises(TrainError, match="train ended after 9 updates, with 40 fresh examples of 200"):
        run(make_study(train), BASELINE, PARAMS, 0)


def test_a_training_without_its_loader_or_without_yield_is_told_so() -> None:
    with pytest.raises(TrainError, match="train yielded without a batch"):
        run(make_study(lambda *_: iter([1.0])), BASELINE, PARAMS, 0)
    with pytest.raises(TrainError, match=r"train returned None \(NoneType\): expected a generator"):
        run(make_study(lambda *_: None), BASELINE, PARAMS, 0)


def test_a_training_is_closed_where_its_run_ends() -> None:
    closed = []

    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[float]:
        try:
            for _ in make_loader(loader_of(), augment):
                yield 1.0
        finally:
            closed.append(seed)

    run(make_study(train), BASELINE, PARAMS, 5)
    assert closed == [5]


def test_evaluations_are_not_part_of_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in ("run", "loader"):
        monkeypatch.setattr(importlib.import_module(f"stretto.study.{module}"), "time", clock)

    def value(updates: int) -> Any:
        now[0] += 2.0  # an update

        def evaluate() -> float:
            now[0] += 100.0
            return updates / 20

        return evaluate if updates % 4 == 0 else None

    assert ran(value).seconds == 20 * 2.0


def test_a_run_survives_as_plain_values() -> None:
    done = ran(lambda updates: updates / 20, BATCH, to_budget=True)
    assert Run.from_plain(done.to_plain()) == done
    assert 0 <= done.au_percent <= 100


@pytest.mark.parametrize("is_generator", [True, False])
def test_a_training_that_never_yields_ends_after_as_many_batches_as_the_budget_has(is_generator: bool) -> None:
    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[None]:
        for _ in make_loader(loader_of(settings.batch_size), augment):
            pass
        yield None

    def train_at_once(settings: Settings, make_loader: MakeLoader, seed: int) -> None:
        next(train(settings, make_loader, seed))

    study = make_study(train if is_generator else train_at_once)
    with pytest.raises(
        TrainError, match="train took 200 batches, as many as the whole budget has, without a yield"
    ):
        run(study, BEFORE, PARAMS, 0)


def test_the_cause_of_a_crash_is_placed_in_the_users_code() -> None:
    frames = ["/home/me/stretto/mine.py", run.__code__.co_filename, random.__file__, torch.__file__]
    trace = "".join(f'  File "{path}", line {number}, in f\n' for number, path in enumerate(frames, 7))
    assert cause(f"Traceback:\n{trace}OSError: disk\n") == "OSError: disk (mine.py, line 7)"
    assert cause(f"Traceback:\n{trace}OSError: disk\nis full\n") == "OSError: disk (mine.py, line 7)"
    assert cause("the metric is nan") == "the metric is nan"
