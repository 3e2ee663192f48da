"""The loader of a run: what a training function gets under each condition, and what is counted."""

import threading
from itertools import islice
from typing import Any

import pytest
import torch

from stretto.study import Condition, TrainError, make_loader
from tests.study.toys import AFTER, BASELINE, BATCH, BEFORE, augment, loader_of

CONDITIONS = [BASELINE, BATCH, AFTER, BEFORE, Condition("after", 2.5, 4, 4)]


def take(
    condition: Condition, num_updates: int, seed: int = 0, loader: Any = None
) -> tuple[list[list[float]], int]:
    """The batches of the first updates as lists, and the fresh examples read for them."""
    make = make_loader(condition, seed)
    batches = [
        numbers.tolist()
        for (numbers,) in islice(make(loader_of() if loader is None else loader, augment), num_updates)
    ]
    fresh = make.fresh_examples
    make.close()
    return batches, fresh


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.key)
def test_two_runs_with_one_seed_get_the_same_batches_and_another_seed_others(condition: Condition) -> None:
    assert take(condition, 60) == take(condition, 60)
    assert take(condition, 60)[0] != take(condition, 60, seed=1)[0]


def test_without_echo_every_batch_is_new_and_passes_run_on() -> None:
    batches, fresh = take(BASELINE, 25)
    assert fresh == 25 * 4
    for first in (0, 10):
        numbers = [int(number) for batch in batches[first : first + 10] for number in batch]
        assert sorted(numbers) == list(range(40))
        assert numbers != sorted(numbers)
    assert batches[:10] != batches[10:20]


@pytest.mark.parametrize(("condition", "factor"), [(BATCH, 2), (AFTER, 2), (BEFORE, 4)])
def test_examples_are_used_as_often_as_the_factor_says(condition: Condition, factor: int) -> None:
    fresh = take(condition, 200)[1]
    in_buffer = condition.buffer_batches * 4 + 4
    assert 200 * 4 / factor <= fresh <= 200 * 4 / factor + in_buffer


def test_the_augmentation_is_new_for_each_use_only_behind_the_echo() -> None:
    for condition, is_new in ((BEFORE, True), (AFTER, False), (BATCH, False)):
        numbers = [number for batch in take(condition, 100)[0] for number in batch]
        assert (len(set(numbers)) == len(numbers)) is is_new


def test_a_short_last_batch_is_counted_as_long_as_it_is() -> None:
    assert take(BASELINE, 22, loader=loader_of(num_examples=38))[1] == 38 + 38 + 2 * 4
    # Ten batches a pass, the last of two examples: 100 batches and what is in the buffer have been read.
    assert take(BATCH, 200, loader=loader_of(num_examples=38))[1] in [10 * 38 + 4 * batches for batches in range(5)]


def test_a_list_of_batches_and_other_trees_will_do() -> None:
    batches = [{"x": torch.arange(4) + 4 * at, "n": 3} for at in range(3)]
    make = make_loader(Condition("batch", 2.0, 2, 4), 0, has_augment=False)
    found = [batch["x"].tolist() for batch in islice(make(batches), 12)]
    make.close()
    assert sorted(map(tuple, found)) == sorted(2 * [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)] * 2)


def test_the_thread_ends_with_the_loader() -> None:
    make = make_loader(BEFORE, 0)
    next(make(loader_of(), augment))
    make.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "stretto-upstream"]


def test_a_training_that_passes_over_its_settings_is_told_so() -> None:
    with pytest.raises(TrainError, match=r"the first batch has 8 examples, settings.batch_size is 4"):
        take(BASELINE, 1, loader=loader_of(batch_size=8))
    make = make_loader(BASELINE, 0)
    make(loader_of(), augment)
    with pytest.raises(TrainError, match="make_loader was called twice in one run"):
        make(loader_of(), augment)
    make.close()
    with pytest.raises(TrainError, match="make_loader got no augmentation, but the study says has_augment=True"):
        make_loader(BASELINE, 0)(loader_of())
    with pytest.raises(TrainError, match="make_loader got an augmentation, but the study says has_augment=False"):
        make_loader(BASELINE, 0, has_augment=False)(loader_of(), augment)


def test_batches_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(TypeError, match="a batch is a str without a tensor"):
        next(make_loader(BASELINE, 0, has_augment=False)(["abc"]))
