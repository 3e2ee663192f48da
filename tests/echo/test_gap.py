"""The memorising guard knows first uses from later ones, and compares their losses."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto import EchoLoader
from stretto.echo.gap import FIRST, LATER, UNKNOWN, WINDOW, EchoGap
from tests.echo.sources import Follower, Rising, id_batches, rest_of_epoch, through_file

GAP = pytest.approx(0.25, rel=1e-9)


@given(
    unit=st.sampled_from(["example", "batch"]),
    factor=st.sampled_from([1, 1.5, 2, 2.5, 3.9, 6, "auto"]),
    carry_over=st.booleans(),
    batch_size=st.integers(1, 7),
    buffer=st.integers(7, 30),
    num_batches=st.integers(1, 12),
    num_epochs=st.integers(1, 3),
)
def test_first_and_later_uses_are_those_of_items_followed_by_identity(
    unit: Any, factor: Any, carry_over: bool, batch_size: int, buffer: int, num_batches: int, num_epochs: int
) -> None:
    follower = Follower()
    source = Rising(num_batches, batch_size)
    with stretto.echo(source, factor, unit=unit, buffer=buffer, carry_over=carry_over, seed=3) as loader:
        for _ in range(num_epochs):
            for batch in loader:
                loader.observe(follower.losses(batch))
        gap = loader.stats().echo_gap
        assert gap is None or gap == GAP
        if factor in (2, 2.5) and num_epochs * num_batches >= 24:
            assert gap is not None


def resumable(factor: Any, unit: Any, **settings: Any) -> EchoLoader:
    return stretto.echo(Rising(12, 4), factor, unit=unit, buffer=16, seed=1, updates_per_epoch=60, **settings)


@pytest.mark.parametrize("unit", ["example", "batch"])
@pytest.mark.parametrize("factor", [2, 2.5, 4])
@pytest.mark.parametrize("checkpoint_buffer", [True, False])
@pytest.mark.parametrize("num_updates", [1, 7, 20])
def test_uses_before_a_resume_count(factor: Any, unit: Any, checkpoint_buffer: bool, num_updates: int) -> None:
    follower = Follower()
    with resumable(factor, unit, checkpoint_buffer=checkpoint_buffer) as loader:
        for _, batch in zip(range(num_updates), loader, strict=False):
            follower.losses(batch)
        state = through_file(loader.state_dict())
    with resumable(factor, unit, checkpoint_buffer=checkpoint_buffer) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            loader.observe(follower.losses(batch))
        assert loader.stats().echo_gap == GAP


@pytest.mark.parametrize("unit", ["example", "batch"])
def test_residents_of_a_state_that_does_not_say_what_was_used_are_left_out_once(unit: Any) -> None:
    follower = Follower()
    with resumable(2.5, unit) as loader:
        for _, batch in zip(range(9), loader, strict=False):
            follower.losses(batch)
        state = loader.state_dict()
    resident = state["stream"]["residents"]
    del resident["kinds"]
    leaves = resident["buffer"]["leaves"]
    unknown = set(torch.cat([torch.as_tensor(leaf).flatten() for leaf in _tensors(leaves)]).tolist())
    assert unknown & follower.seen
    assert unknown - follower.seen
    with resumable(2.5, unit) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            losses = follower.losses(batch)
            is_unknown = torch.tensor([item in unknown for item in batch.tolist()])
            unknown -= set(batch.tolist())
            loader.observe(torch.where(is_unknown, 1e6, losses))
        assert loader.stats().echo_gap == GAP


def _tensors(leaves: Any) -> Iterable[torch.Tensor]:
    if isinstance(leaves, torch.Tensor):
        yield leaves
    else:
        for leaf in leaves:
            yield from _tensors(leaf)


def test_an_item_twice_in_a_batch_is_new_both_times_if_no_update_used_it() -> None:
    with stretto.echo(id_batches(1, 4, last=4), 8, carry_over=False) as loader:
        for at, batch in enumerate(loader):
            assert sorted(batch.tolist()) == [0, 1, 2, 3]
            loader.observe([1.0 if at == 0 else 0.5] * 4)
        assert loader.stats().duplicates == 0
    with stretto.echo([torch.arange(4), torch.arange(4, 5)], 4, carry_over=False, buffer=4) as loader:
        seen: set[int] = set()
        for batch in loader:
            items = batch.tolist()
            assert loader._gap._kinds is not None
            assert loader._gap._kinds.tolist() == [LATER if item in seen else FIRST for item in items]
            seen.update(items)
        assert loader.stats().duplicates > 0


def slow_gap(updates: list[tuple[list[float], list[int]]]) -> float | None:
    """The module's formula, update by update."""
    updates = updates[-WINDOW:]

    def some(at: int, kind: int) -> list[float]:
        return [loss for loss, of in zip(*updates[at], strict=True) if of == kind and math.isfinite(loss)]

    over = under = 0.0
    num_compared = 0
    for at in range(len(updates)):
        firsts, laters = some(at, FIRST), [some(at, LATER)]
        if not firsts:
            continue
        if not laters[0]:
            before = next((some(other, LATER) for other in range(at, -1, -1) if some(other, LATER)), None)
            after = next((some(other, LATER) for other in range(at, len(updates)) if some(other, LATER)), None)
            if before is None or after is None:
                continue
            laters = [before, after]
        num_compared += 1
        num_later = sum(len(losses) for losses in laters)
        weight = len(firsts) * num_later / (len(firsts) + num_later)
        first = sum(firsts) / len(firsts)
        over += weight * (first - sum(sum(losses) / len(losses) for losses in laters) / len(laters))
        under += weight * first
    return over / abs(under) if num_compared >= 5 and under else None


LOSSES = st.one_of(st.floats(-2, 8, width=16), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
EXAMPLES = st.lists(st.tuples(LOSSES, st.sampled_from([FIRST, LATER, UNKNOWN])), min_size=1, max_size=4)
WHOLE = st.tuples(st.sampled_from([FIRST, LATER]), st.lists(LOSSES, min_size=1, max_size=3))


@given(updates=st.lists(EXAMPLES, min_size=8, max_size=60), read_at=st.integers(0, 60))
def test_gap_of_examples_is_that_of_the_formula(updates: list[list[tuple[float, int]]], read_at: int) -> None:
    gap, told = EchoGap(), []
    for at, rows in enumerate(updates):
        losses, kinds = [loss for loss, _ in rows], [kind for _, kind in rows]
        told.append((losses, kinds))
        gap.handed_out(np.array(kinds, np.int8), is_whole=False)
        gap.observe(torch.tensor(losses))
        if at == read_at:
            assert gap.gap == pytest.approx(slow_gap(told))
    assert gap.gap == pytest.approx(slow_gap(told))


@given(updates=st.lists(WHOLE, min_size=20, max_size=120))
def test_gap_of_whole_batches_is_that_of_the_formula(updates: list[tuple[int, list[float]]]) -> None:
    gap, told = EchoGap(), []
    for kind, losses in updates:
        told.append((losses, [kind] * len(losses)))
        gap.handed_out(np.array([kind], np.int8), is_whole=True)
        gap.observe(losses)
    assert gap.gap == pytest.approx(slow_gap(told))


def test_steady_progress_is_no_gap() -> None:
    """Whole batches: every loss is a straight line of the update."""
    with stretto.echo(Rising(10, 2), 4, unit="batch", updates_per_epoch=400, seed=2) as loader:
        for at, _ in enumerate(loader):
            loader.observe([3 - 0.005 * at])
        gap = loader.stats().echo_gap
    assert gap is not None
    assert abs(gap) < 0.01


def test_only_the_latest_updates_count() -> None:
    gap = EchoGap()
    for later, num_updates in [(0.5, 300), (0.9, WINDOW)]:
        for _ in range(num_updates):
            gap.handed_out(np.array([FIRST, LATER], np.int8), is_whole=False)
            gap.observe([1.0, later])
    assert gap.gap == pytest.approx(0.1)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.array,
        lambda losses: np.array(losses, np.float32),
        torch.tensor,
        lambda losses: torch.tensor(losses, dtype=torch.bfloat16),
        lambda losses: torch.tensor(losses, requires_grad=True) * 1,
    ],
)
def test_losses_may_be_tensors_arrays_or_sequences(form: Callable[[Any], Any]) -> None:
    with stretto.echo(Rising(20, 4), 2, buffer=8, updates_per_epoch=60) as loader:
        follower = Follower()
        for batch in loader:
            loader.observe(form(follower.losses(batch).tolist()))
        assert loader.stats().echo_gap == GAP


def test_losses_are_those_at_the_call() -> None:
    with stretto.echo(Rising(20, 4), 2, buffer=8, updates_per_epoch=60) as loader:
        follower = Follower()
        for at, batch in enumerate(loader):
            losses: Any = follower.losses(batch)
            losses = losses.numpy() if at % 2 else losses
            loader.observe(losses)
            losses[:] = 7
        assert loader.stats().echo_gap == GAP


def test_there_is_no_gap_without_losses_or_without_echo_or_if_all_losses_are_zero() -> None:
    with stretto.echo(Rising(20, 4), 2, updates_per_epoch=60) as loader:
        assert loader.stats().echo_gap is None
        for batch in loader:
            loader.observe(torch.zeros(len(batch)))
        assert loader.stats().echo_gap is None
    with stretto.echo(Rising(20, 4), 1, updates_per_epoch=60) as loader:
        for batch in loader:
            loader.observe(torch.ones(len(batch)))
        assert loader.stats().echo_gap is None


def test_a_gap_of_negative_losses_is_relative_to_their_size() -> None:
    gap = EchoGap()
    for _ in range(20):
        gap.handed_out(np.array([FIRST, LATER], np.int8), is_whole=False)
        gap.observe([-2.0, -3.0])
    assert gap.gap == 0.5


@pytest.mark.parametrize("unit", ["example", "batch"])
def test_observing_changes_no_batch_and_no_state(unit: Any) -> None:
    ran = []
    for observes in (False, True):
        with resumable(2.5, unit) as loader:
            batches = []
            for at, batch in enumerate(loader):
                batches.append(batch.tolist())
                if observes:
                    loader.observe(torch.rand(len(batch)))
                if at == 20:
                    state = through_file(loader.state_dict())
        ran.append((batches, state, rest_of_epoch(resumable(2.5, unit), state)))
    (batches, state, rest), (other_batches, other_state, other_rest) = ran
    assert batches == other_batches
    assert torch.equal(torch.stack(rest), torch.stack(other_rest))
    assert str(state) == str(other_state)


def test_a_wrong_number_of_losses_is_told_with_both() -> None:
    with stretto.echo(id_batches(4, 3), 2) as loader:
        iterator = iter(loader)
        next(iterator)
        for wrong in (torch.ones(2), [1.0] * 4, np.ones((3, 1)), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=r"found losses of shape .* expected \(3,\)"):
                loader.observe(wrong)
        loader.observe([1, 2, 3])  # the batch has not been observed by that


def test_whole_batches_have_any_number_of_losses_but_none() -> None:
    with stretto.echo(id_batches(4, 3), 2, unit="batch") as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="found 0 losses"):
            loader.observe([])
        loader.observe([1.0])
        next(iterator)
        loader.observe(torch.tensor(1.0))
        next(iterator)
        loader.observe(torch.ones(5))


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "abc",
        ["a", "b", "c"],
        1.5,
        [1.0, None, 2.0],
        [[1.0], [1.0, 2.0], []],
        [True, False, True],
        torch.tensor([True, False, True]),
        torch.ones(3, dtype=torch.complex64),
        {1.0: 1, 2.0: 2, 3.0: 3},
        (loss for loss in (1.0, 2.0, 3.0)),
        list(torch.ones(3, requires_grad=True) * 1),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
    ],
)
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    with stretto.echo(id_batches(4, 3), 2) as loader:
        _ = next(iter(loader))
        with pytest.raises(TypeError, match="expected a tensor, an array or a sequence of real numbers"):
            loader.observe(wrong)


def test_losses_that_cannot_be_read_are_dropped() -> None:
    gap = EchoGap()
    gap.handed_out(np.array([FIRST, LATER], np.int8), is_whole=False)
    gap.observe([1.0, 0.5])
    gap._pending.append((torch.ones(2, device="meta"), np.array([FIRST, LATER], np.int8)))
    with pytest.raises(RuntimeError):
        _ = gap.gap
    for _ in range(5):
        gap.handed_out(np.array([FIRST, LATER], np.int8), is_whole=False)
        gap.observe([1.0, 0.5])
    assert gap.gap == 0.5


def test_of_a_whole_batch_only_sums_are_kept() -> None:
    gap = EchoGap()
    gap.handed_out(np.array([FIRST], np.int8), is_whole=True)
    gap.observe(torch.rand(4, 1000))
    ((kept, kinds),) = gap._pending
    assert (kept.numel(), len(kinds)) == (3, 1)


def test_each_batch_is_observed_at_most_once_and_not_before_it_is_handed_out() -> None:
    with stretto.echo(id_batches(4, 3), 2) as loader:
        with pytest.raises(ValueError, match="no batch was handed out yet"):
            loader.observe([1.0, 2.0, 3.0])
        iterator = iter(loader)
        next(iterator)
        next(iterator)  # the first one may stay unobserved
        loader.observe([1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="observed already"):
            loader.observe([1.0, 2.0, 3.0])
        state = loader.state_dict()
        next(iterator)
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="no batch was handed out yet"):
            loader.observe([1.0, 2.0, 3.0])
