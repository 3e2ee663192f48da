"""What a state holds, what it refuses, and that saving it never waits."""

import copy
from collections import Counter, UserDict
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from tests.echo.sources import Counting, Gated, epoch, flat, id_batches, rest_of_epoch, state_after, through_file

UNITS = pytest.mark.parametrize("unit", ["example", "batch"])


class Marked(torch.Tensor):
    pass


def batch_of_all_types(ids: torch.Tensor) -> dict[str, Any]:
    numbers = ids.numpy()
    return {
        "image": ids.view(-1, 1, 1, 1).expand(-1, 2, 2, 3).float().contiguous(memory_format=torch.channels_last),
        "bfloat16": ids.bfloat16(),
        "marked": ids.float().as_subclass(Marked),
        "arrays": (numbers.astype("uint16"), numbers.astype("f8"), UserDict(mask=numbers % 2 == 0)),
        "empty": torch.zeros(len(ids), 0),
    }


@UNITS
def test_a_restored_buffer_yields_the_types_that_were_saved(unit: str) -> None:
    def make() -> stretto.EchoLoader:
        source = [batch_of_all_types(ids) for ids in torch.arange(12).split(4)]
        return stretto.echo(source, 3, unit=unit, updates_per_epoch=20)

    with make() as whole:
        expected = [*whole][5:]
    for batch, wanted in zip(rest_of_epoch(make(), state_after(make(), 5)), expected, strict=True):
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
        assert type(batch["marked"]) is Marked
        assert type(batch["arrays"][2]) is UserDict
        assert [leaf.dtype for leaf in batch["arrays"][:2]] == [np.uint16, np.float64]
        assert batch["arrays"][2]["mask"].dtype == bool
        torch.testing.assert_close(batch, wanted, rtol=0, atol=0)


def test_numbers_and_strings_of_whole_batches_come_back() -> None:
    def make() -> stretto.EchoLoader:
        return stretto.echo([(at, np.float32(at), ["a", "b"], None) for at in range(3)], 4, unit="batch")

    with make() as whole:
        expected = [*whole][3:]
    restored = rest_of_epoch(make(), state_after(make(), 3))
    assert restored == expected
    assert {type(batch[1]) for batch in restored} == {np.float32}


@UNITS
def test_a_state_without_the_buffer_counts_the_uses_it_drops(unit: str) -> None:
    def make() -> stretto.EchoLoader:
        return stretto.echo(id_batches(9, 4), 3, unit=unit, checkpoint_buffer=False)

    with make() as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        state, before = through_file(loader.state_dict()), loader.stats()
    with make() as loader:
        loader.load_state_dict(state)
        rest = epoch(loader)
        after = loader.stats()
    assert state["stream"]["residents"]["buffer"] is None
    assert len(rest) == len(loader) - 6
    assert after.dropped_uses == 3 * before.fresh_items - before.uses > 0
    assert before.fresh_items < after.fresh_items
    assert set(flat(rest[:1])) <= set(range(4 * before.fresh_batches, 36))


def test_the_largest_part_of_a_state_is_the_items_themselves() -> None:
    state = state_after(stretto.echo([torch.zeros(4, 1000)] * 9, 3), 6)
    (leaf,) = state["stream"]["residents"]["buffer"]["leaves"]
    assert leaf.shape[1:] == (1000,)
    assert leaf.untyped_storage().nbytes() == leaf.nbytes


@UNITS
def test_a_saved_state_does_not_change_afterwards(unit: str) -> None:
    with stretto.echo(id_batches(6, 4), 3, unit=unit) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        state = loader.state_dict()
        twin = copy.deepcopy(state)
        for batch in iterator:
            batch.fill_(-1)
    assert repr(state) == repr(twin)


def test_the_loaders_state_is_the_one_right_after_the_admitted_batch() -> None:
    """Although the thread has read on since, and the loader changes its state in place."""
    with stretto.echo(Counting(), 1, buffer=2) as loader:
        whole = epoch(loader)
    for step in range(9):
        state = state_after(stretto.echo(Counting(), 1, buffer=2), step)
        assert [batch.tolist() for batch in rest_of_epoch(stretto.echo(Counting(), 1, buffer=2), state)] == whole[
            step:
        ]


@pytest.mark.parametrize("factor", [2, "auto"])
def test_saving_never_waits_for_a_source_that_is_stuck(factor: Any) -> None:
    source = Gated(id_batches(6, 4))
    with stretto.echo(source, factor) as loader, source:
        assert loader.state_dict()["stream"]["has_begun"] is False
        iterator = iter(loader)
        loader.state_dict()
        source.release()
        next(iterator)
        assert loader.state_dict()["counters"]["fresh_items"] == 4


def test_loading_ends_the_iteration_that_is_open() -> None:
    with stretto.echo(id_batches(4, 3), 2) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(RuntimeError, match="this iterator is over"):
            next(iterator)
        assert Counter(map(len, epoch(loader))) == {3: 7}


def test_a_closed_loader_has_no_state() -> None:
    loader = stretto.echo(id_batches(4, 3))
    loader.close()
    with pytest.raises(ValueError, match="this EchoLoader is closed"):
        loader.state_dict()
