"""What a study compares."""

from pathlib import Path

import pytest

from stretto.study import Condition, Search, plan
from tests.study.toys import make_study


def test_the_plan_begins_with_the_baseline_of_each_batch_size() -> None:
    found = plan(make_study(), [2, "auto"], ["before", "none"], buffers=[8, 4], batch_sizes=[4, 16])
    assert [condition.key for condition in found] == [
        "none b4",
        "before e2 buffer8 b4",
        "before eauto buffer8 b4",
        "before e2 buffer4 b4",
        "before eauto buffer4 b4",
        "none b16",
        "before e2 buffer8 b16",
        "before eauto buffer8 b16",
        "before e2 buffer4 b16",
        "before eauto buffer4 b16",
    ]


def test_without_an_augmentation_nothing_is_echoed_before_it() -> None:
    study = make_study(has_augment=False)
    assert [condition.variant for condition in plan(study, [2])] == ["none", "batch", "after"]
    assert [condition.variant for condition in plan(study, [2], ["none", "workers"])] == ["none", "workers"]
    with pytest.raises(ValueError, match='variant "before" needs an augmentation'):
        plan(study, [2], ["none", "before"])


def test_the_workers_echo_only_where_that_is_asked_for() -> None:
    assert [condition.variant for condition in plan(make_study(), [2])] == ["none", "batch", "after", "before"]
    (found,) = plan(make_study(), [2], ["workers"])
    assert (found.key, found.title) == (
        "workers e2 buffer4 b4",
        "examples, in the workers, e = 2, buffer 4, batch 4",
    )


def test_a_condition_that_is_named_twice_is_made_once() -> None:
    assert len(plan(make_study(), [2, 2.0], ["before", "before"])) == 1


def test_a_title_says_all() -> None:
    assert Condition("before", 2.5, 16, 64).title == "examples, before augmentation, e = 2.5, buffer 16, batch 64"
    assert Condition.baseline(64).title == "no echo, batch 64"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("behind", 2.0, 4, 4), "variant 'behind': expected one of none, batch, after, before, workers"),
        (("before", 0.5, 4, 4), "factor=0.5: expected a finite number >= 1"),
        (("before", 1, 4, 4), 'factor=1 with variant "before": that is no echo'),
        (("none", 2, 4, 4), 'variant "none" with factor=2.0, buffer_batches=4: expected 1 and 1'),
        (("batch", 2, 0, 4), "buffer_batches=0: expected an integer >= 1"),
        (("batch", 2, 4, 4.0), "batch_size=4.0 is a float"),
    ],
)
def test_a_condition_that_cannot_work_is_refused(arguments: tuple, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        Condition(*arguments)


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="there is nothing to run"):
        plan(make_study(), [], ["before"])
    with pytest.raises(ValueError, match="variant 'behind': expected one of"):
        plan(make_study(), [2], ["behind"])


def test_a_batch_may_be_as_large_as_the_budget_and_no_larger(tmp_path: Path) -> None:
    study, says = make_study(), "batch_size=201: expected at most the study's budget, max_fresh_examples=200"
    assert plan(study, variants=["none"], batch_sizes=[200]) == [Condition.baseline(200)]
    with pytest.raises(ValueError, match=says):
        plan(study, batch_sizes=[4, 201])
    with pytest.raises(ValueError, match=says):
        Search(study, [Condition.baseline(201)], tmp_path / "s.db")
    assert list(tmp_path.iterdir()) == []
