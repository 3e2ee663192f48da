"""The event model: when which block computes what, and how fast that is."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.pipelining.events import (
    BlockTimes,
    Operation,
    Timeline,
    play,
    play_microbatches,
    predict,
    predict_microbatches,
    recomputes,
    smallest_m,
)
from stretto.pipelining.spec import Staleness
from tests.pipelining.test_spec import legal

SECONDS = st.integers(1, 9).map(float)


@st.composite
def settled(draw: st.DrawFn) -> tuple[Staleness, BlockTimes, list[float]]:
    spec = draw(legal())
    each = st.lists(SECONDS, min_size=spec.K, max_size=spec.K)
    hops = draw(st.lists(st.integers(0, 5).map(float), min_size=spec.K - 1, max_size=spec.K - 1))
    return spec, BlockTimes(draw(each), draw(each), draw(each)), hops


def with_last_counted(num_blocks: int) -> BlockTimes:
    """The whole net's forward 1 and backward 2, cut so that the last block has as much work without a recompute."""
    shares = [1 / 4] * (num_blocks - 1) + [1 / 3]
    shares = [share / sum(shares) for share in shares]
    return BlockTimes(shares, [2 * share for share in shares])


@pytest.mark.parametrize(
    ("num_blocks", "even", "counted", "stashed", "gpipe_4", "gpipe_8"),
    [(4, 3.00, 3.25, 4.00, 2.29, 2.91), (2, 1.50, 1.75, 2.00, 1.60, 1.78)],
)
def test_ideal_speedups_without_hops(
    num_blocks: int, even: float, counted: float, stashed: float, gpipe_4: float, gpipe_8: float
) -> None:
    times, default = BlockTimes.even(num_blocks), Staleness.of(num_blocks)
    kept = Staleness.delayed_gradients(num_blocks)
    assert predict(default, times).speedup == pytest.approx(even)
    assert predict(default, with_last_counted(num_blocks)).speedup == pytest.approx(counted)
    assert predict(kept, times).speedup == pytest.approx(stashed)
    for kind in ("gpipe", "1f1b"):
        assert round(predict_microbatches(kind, times, 4).speedup, 2) == gpipe_4
        assert round(predict_microbatches(kind, times, 8).speedup, 2) == gpipe_8
    assert predict(Staleness.backprop(num_blocks), times).speedup == pytest.approx(1)


def test_longer_queues_hide_a_hop_of_half_a_forward() -> None:
    times = BlockTimes.even(4)
    # 1.78 if the recompute waited for the gradient, too
    assert predict(Staleness.of(4), times, hop_s=0.5).speedup == pytest.approx(2)
    assert predict(Staleness.dsp(4), times, hop_s=0.5).speedup == pytest.approx(3)
    assert smallest_m(times, 0.5) == Staleness.dsp(4)
    assert smallest_m(times) == Staleness.of(4)


@settings(max_examples=25)
@given(settled())
def test_the_formula_is_the_slope_of_the_events(case: tuple[Staleness, BlockTimes, list[float]]) -> None:
    spec, times, hops = case
    span = math.lcm(*(1 + spec.m[i] - spec.m[j] for i in range(spec.K) for j in range(i, spec.K)))
    assume(span < 300)
    played = play(spec, times, hop_s=hops, num_batches=800)
    starts = [one.start_s for one in played.operations if one.block == 0 and one.kind == "forward"]
    expected = span * predict(spec, times, hop_s=hops).seconds_per_batch
    assert starts[-1] - starts[-1 - span] == pytest.approx(expected, rel=1e-9)


@given(settled())
def test_every_operation_waits_for_what_it_needs_and_no_longer(
    case: tuple[Staleness, BlockTimes, list[float]],
) -> None:
    spec, times, hops = case
    played = play(spec, times, hop_s=hops, num_batches=5)
    ends = {(one.block, one.kind, one.batch): one.end_s for one in played.operations}
    assert len(ends) == 5 * (2 * spec.K + sum(recomputes(spec)))
    for k in range(spec.K):
        own = [one for one in played.operations if one.block == k]
        assert [one.batch for one in own if one.kind == "forward"] == list(range(5))
        assert [one.batch for one in own if one.kind == "backward"] == list(range(5))
        for before, one in zip([None, *own], own, strict=False):
            ready = before.end_s if before else 0.0
            if one.kind == "forward" and k > 0:
                ready = max(ready, ends[k - 1, "forward", one.batch] + hops[k - 1])
            if one.kind == "backward" and k + 1 < spec.K:
                ready = max(ready, ends[k + 1, "backward", one.batch] + hops[k])
            assert one.start_s == ready


@given(settled(), st.data())
def test_longer_queues_are_never_slower_and_nothing_passes_the_bound(
    case: tuple[Staleness, BlockTimes, list[float]], data: st.DataObject
) -> None:
    spec, times, hops = case
    spec = replace(spec, backward_params="stashed")
    more = [data.draw(st.integers(0, 2)) for _ in range(spec.K - 1)] + [0]
    queues = [q + extra for q, extra in zip(spec.q, more, strict=True)]
    longer = Staleness.dsp(spec.K, spec.p, queues, "stashed")
    found, better = (predict(each, times, hop_s=hops) for each in (spec, longer))
    assert better.seconds_per_batch <= found.seconds_per_batch
    assert better.seconds_per_batch >= max(times.work_s(longer))
    assert max(better.utilisation) <= 1


@given(settled())
def test_without_staleness_a_batch_takes_the_sum_of_all_times(
    case: tuple[Staleness, BlockTimes, list[float]],
) -> None:
    spec, times, hops = case
    total = times.one_device_s + 2 * sum(hops)
    assert predict(Staleness.backprop(spec.K), times, hop_s=hops).seconds_per_batch == total
    for kind in ("gpipe", "1f1b"):
        assert play_microbatches(kind, times, 1, hop_s=hops).end_s == total


@given(settled())
def test_the_smallest_m_keeps_the_devices_busy_and_no_smaller_one_does(
    case: tuple[Staleness, BlockTimes, list[float]],
) -> None:
    spec, times, hops = case
    found = smallest_m(times, hops, backward_params=spec.backward_params)
    patterns = [(100 * (spec.K - k) for k in range(stale)) for stale in range(spec.K)]
    ages = [(*pattern, *[0] * (spec.K - stale)) for stale, pattern in enumerate(patterns)]
    plenty = [Staleness.of(spec.K, m=age, backward_params=spec.backward_params) for age in ages]
    best = min(predict(each, times, hop_s=hops).seconds_per_batch for each in plenty)
    assert predict(found, times, hop_s=hops).seconds_per_batch <= best / 0.99 * (1 + 1e-6)
    for k in range(spec.K):
        ages = [*found.m[:k], found.m[k] - 1, *found.m[k + 1 :]]
        if ages == sorted(ages, reverse=True) and ages[-1] == 0:
            smaller = Staleness.of(spec.K, m=ages, backward_params=spec.backward_params)
            assert predict(smaller, times, hop_s=hops).seconds_per_batch > best / 0.99


def test_a_block_too_small_to_pay_for_the_recompute_of_the_other_gets_no_staleness() -> None:
    assert smallest_m(BlockTimes((9, 0.1), (18, 0.2))) == Staleness.backprop(2)


def test_the_events_of_two_blocks_by_hand() -> None:
    played = play(Staleness.of(2), BlockTimes((1, 2), (3, 4)), hop_s=0.5, num_batches=2)
    assert played.operations == (
        Operation(0, "forward", 0, 0, 1),
        Operation(0, "forward", 1, 1, 2),
        Operation(0, "recompute", 0, 2, 3),
        Operation(0, "backward", 0, 8, 11),
        Operation(0, "recompute", 1, 11, 12),
        Operation(0, "backward", 1, 14, 17),
        Operation(1, "forward", 0, 1.5, 3.5),
        Operation(1, "backward", 0, 3.5, 7.5),
        Operation(1, "forward", 1, 7.5, 9.5),
        Operation(1, "backward", 1, 9.5, 13.5),
    )
    assert played.utilisation == (10 / 17, 12 / 17)


def test_1f1b_by_hand() -> None:
    played = play_microbatches("1f1b", BlockTimes((2, 2), (4, 4)), 2)
    first = [(one.kind[0], one.batch, one.start_s) for one in played.operations if one.block == 0]
    last = [(one.kind[0], one.batch, one.start_s) for one in played.operations if one.block == 1]
    assert first == [("f", 0, 0), ("f", 1, 1), ("b", 0, 4), ("b", 1, 7)]
    assert last == [("f", 0, 1), ("b", 0, 2), ("f", 1, 4), ("b", 1, 5)]


def test_checkpointing_costs_gpipe_a_forward() -> None:
    times = BlockTimes.even(2)
    assert predict_microbatches("gpipe", times, 4, checkpoint=True).seconds_per_batch == pytest.approx(2.5)
    assert predict_microbatches("gpipe", times, 4).seconds_per_batch == pytest.approx(1.875)


def test_one_block_needs_no_staleness() -> None:
    assert smallest_m(BlockTimes((1,), (2,))) == Staleness.backprop(1)
    assert predict(Staleness.of(1), BlockTimes((1,), (2,)), hop_s=9).speedup == 1


def test_a_run_of_no_batch_is_empty() -> None:
    assert play(Staleness.of(3), BlockTimes.even(3), num_batches=0) == Timeline((), 3)
    assert play(Staleness.of(3), BlockTimes.even(3), num_batches=0).utilisation == (0, 0, 0)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: BlockTimes((1, 2), (1,)), "'backward_s': 1"),
        (lambda: BlockTimes((), ()), "one block or more"),
        (lambda: BlockTimes((1, -1), (1, 1)), r"forward_s=\(1.0, -1.0\)"),
        (lambda: BlockTimes((1, math.nan), (1, 1)), "forward_s"),
        (lambda: BlockTimes((0, 0), (0, 0)), "all times are 0"),
        (lambda: BlockTimes.even(0), "0 blocks"),
        (lambda: predict(Staleness.of(3), BlockTimes.even(2)), "times of 2 blocks for DSP.*has 3"),
        (lambda: play(Staleness.of(3), BlockTimes.even(2)), "times of 2 blocks"),
        (lambda: predict(Staleness.of(3), BlockTimes.even(3), hop_s=[1]), "each of the 2 gaps"),
        (lambda: predict(Staleness.of(3), BlockTimes.even(3), hop_s=-1), "hop_s=-1"),
        (lambda: predict_microbatches("gpipe", BlockTimes.even(3), 0), "0 micro-batches"),
        (lambda: predict_microbatches("zb", BlockTimes.even(3), 2), "'zb': expected \"gpipe\""),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(made: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made()
