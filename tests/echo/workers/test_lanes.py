"""The order of uses: each item its number of times, in one lane, and as long as was said."""

import itertools
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.echo.factor import num_uses
from stretto.echo.workers.lanes import Lanes, LaneSettings, Uses, count_batches, deal

FACTORS = [1.0, 1.3, 1.5, 2.0, 2.7, 3.0, 5.0, 6.5]
COUNTS = st.integers(0, 100)
EPOCHS = st.integers(0, 3)


@st.composite
def lane_settings(draw: st.DrawFn, **given_ones: Any) -> LaneSettings:
    factor = draw(st.sampled_from(FACTORS))
    batch_size = draw(st.integers(1, 9))
    drawn = {
        "factor": factor,
        "max_uses": math.ceil(factor),
        "batch_size": batch_size,
        "num_lanes": draw(st.integers(1, 6)),
        "capacity": batch_size + draw(st.integers(0, 30)),
        "drop_last": draw(st.booleans()),
        "is_even": draw(st.booleans()),
        "is_open": False,
        "seed": draw(st.integers(0, 5)),
    }
    return LaneSettings(**(drawn | given_ones))


def order(count: int) -> Iterator[str]:
    """The items, which are not their positions."""
    return (f"item {position}" for position in range(count))


def batches_of(chosen: LaneSettings, epoch: int, num_items: int) -> tuple[list[Uses], Lanes]:
    lanes = Lanes(chosen, epoch, order(num_items), num_items)
    return list(lanes), lanes


def due_uses(chosen: LaneSettings, epoch: int, num_items: int) -> dict[int, int]:
    return dict(enumerate(num_uses(chosen.factor, chosen.seed, epoch, 0, num_items).tolist()))


def used(batches: list[Uses]) -> Counter[int]:
    return Counter(position for batch in batches for position in batch.positions.tolist())


def lanes_of(batches: list[Uses], num_lanes: int) -> dict[int, set[int]]:
    """For each position the lanes in which it was used."""
    lanes: dict[int, set[int]] = defaultdict(set)
    for number, batch in enumerate(batches):
        for position in batch.positions.tolist():
            lanes[position].add(number % num_lanes)
    return lanes


def assert_uses_are_numbered(batches: list[Uses], *, all_end: bool = True) -> None:
    """Uses of a position count up from 0, and the last of them says so, once."""
    next_use: Counter[int] = Counter()
    ended: set[int] = set()
    for batch in batches:
        for position, item, use, is_last in batch.rows():
            assert item == f"item {position}"
            assert use == next_use[position]
            assert position not in ended
            next_use[position] += 1
            if is_last:
                ended.add(position)
    if all_end:
        assert ended == set(next_use)


def assert_batches_are_distinct(batches: list[Uses], batch_size: int) -> None:
    for batch in batches:
        size = len(batch.positions)
        assert 1 <= size <= batch_size
        assert batch.num_duplicates == size - len(set(batch.positions.tolist()))


@given(lane_settings(drop_last=False, is_even=False), EPOCHS, COUNTS)
def test_every_item_is_used_exactly_its_number_of_times(chosen: LaneSettings, epoch: int, count: int) -> None:
    batches, lanes = batches_of(chosen, epoch, count)
    assert used(batches) == due_uses(chosen, epoch, count)
    assert lanes.uses_left == 0
    assert lanes.num_dealt == count
    assert_uses_are_numbered(batches)
    assert_batches_are_distinct(batches, chosen.batch_size)


@given(lane_settings(), EPOCHS, COUNTS)
def test_the_number_of_batches_is_known_ahead(chosen: LaneSettings, epoch: int, count: int) -> None:
    assume(count >= chosen.num_lanes or not chosen.is_even)
    batches, lanes = batches_of(chosen, epoch, count)
    assert len(batches) == lanes.num_batches == count_batches(chosen, epoch, count)


@given(lane_settings(is_even=False), EPOCHS, COUNTS)
def test_all_uses_of_an_item_are_in_one_lane(chosen: LaneSettings, epoch: int, count: int) -> None:
    assume(chosen.batch_size >= chosen.factor + 2)
    batches, _ = batches_of(chosen, epoch, count)
    assert all(len(lanes) == 1 for lanes in lanes_of(batches, chosen.num_lanes).values())


@given(lane_settings(is_even=False), EPOCHS, COUNTS)
def test_a_batch_is_short_only_if_it_has_all_residents_of_its_lane(
    chosen: LaneSettings, epoch: int, count: int
) -> None:
    assume(chosen.batch_size >= chosen.factor + 2)
    batches, _ = batches_of(chosen, epoch, count)
    for number, batch in enumerate(batches):
        if len(batch.positions) < chosen.batch_size:
            later = used(batches[number + chosen.num_lanes :: chosen.num_lanes])
            assert later.keys() <= set(batch.positions.tolist())


@given(lane_settings(is_even=False, drop_last=True), EPOCHS, COUNTS)
def test_drop_last_leaves_full_batches_and_counts_the_rest(chosen: LaneSettings, epoch: int, count: int) -> None:
    batches, lanes = batches_of(chosen, epoch, count)
    due, done = due_uses(chosen, epoch, count), used(batches)
    assert all(len(batch.positions) == chosen.batch_size for batch in batches)
    assert all(done[position] <= due[position] for position in done)
    assert lanes.uses_left == sum(due.values()) - done.total() < chosen.num_lanes * chosen.batch_size
    assert_uses_are_numbered(batches, all_end=False)
    for batch in batches:
        assert all((use + 1 == due[position]) == is_last for position, _, use, is_last in batch.rows())


@given(lane_settings(is_even=True), EPOCHS, COUNTS)
def test_even_lanes_have_equally_many_full_batches(chosen: LaneSettings, epoch: int, count: int) -> None:
    assume(count >= chosen.num_lanes)
    batches, lanes = batches_of(chosen, epoch, count)
    due, done = due_uses(chosen, epoch, count), used(batches)
    assert len(batches) % chosen.num_lanes == 0
    assert all(len(batch.positions) == chosen.batch_size for batch in batches)
    assert all(len(of_item) == 1 for of_item in lanes_of(batches, chosen.num_lanes).values())
    assert_batches_are_distinct(batches, chosen.batch_size)
    assert_uses_are_numbered(batches, all_end=not chosen.drop_last)
    if chosen.drop_last:
        assert all(done[position] <= due[position] for position in done)
    else:
        assert all(done[position] >= due[position] for position in due)
        assert lanes.uses_left == 0


def test_even_lanes_need_an_item_each() -> None:
    chosen = LaneSettings(
        factor=2.0,
        max_uses=2,
        batch_size=4,
        num_lanes=4,
        capacity=8,
        drop_last=False,
        is_even=True,
        is_open=False,
        seed=0,
    )
    with pytest.raises(ValueError, match=r"3 items for 4 lanes \(processes x workers\): expected one for each"):
        Lanes(chosen, 0, order(3), 3)
    assert len(list(Lanes(chosen, 0, order(4), 4))) == 4


@given(
    lane_settings(factor=1.0, max_uses=6, is_open=True),
    EPOCHS,
    COUNTS,
    st.lists(st.floats(1, 6), min_size=1, max_size=8),
)
def test_a_changing_factor_holds_for_the_items_dealt_from_there_on(
    chosen: LaneSettings, epoch: int, count: int, factors: list[float]
) -> None:
    lanes = Lanes(chosen, epoch, order(count))
    due: dict[int, int] = {}
    batches = []
    for at in itertools.count():
        lanes.factor = factors[at // 3 % len(factors)]
        start = lanes.num_dealt
        batch = next(lanes, None)
        added = num_uses(lanes.factor, chosen.seed, epoch, start, lanes.num_dealt - start)
        due |= dict(enumerate(added.tolist(), start))
        if batch is None:
            break
        batches.append(batch)
    done = used(batches)
    assert lanes.num_dealt == count
    assert all(done[position] <= due[position] <= chosen.max_uses for position in done)
    assert lanes.uses_left == sum(due.values()) - done.total()
    assert_batches_are_distinct(batches, chosen.batch_size)
    assert_uses_are_numbered(batches, all_end=False)
    if chosen.is_even or chosen.drop_last:
        assert all(len(batch.positions) == chosen.batch_size for batch in batches)
    else:
        assert done == due
    if chosen.is_even:
        assert len(batches) % chosen.num_lanes == 0
        assert all(len(of_item) == 1 for of_item in lanes_of(batches, chosen.num_lanes).values())


@given(lane_settings(is_even=False), st.integers(1, 40))
def test_an_order_without_an_end_is_taken_as_it_is_needed(chosen: LaneSettings, num_batches: int) -> None:
    taken = itertools.count()
    lanes = Lanes(chosen, 0, (f"item {position}" for position in taken))
    batches = list(itertools.islice(lanes, num_batches))
    assert len(batches) == num_batches
    assert all(len(batch.positions) == chosen.batch_size for batch in batches)
    assert next(taken) == lanes.num_dealt
    block = chosen.num_lanes * max(1, chosen.batch_size // chosen.num_lanes)
    entered = num_batches * chosen.batch_size / math.floor(chosen.factor) + chosen.capacity * chosen.num_lanes
    assert lanes.num_dealt <= entered + block


@given(lane_settings(), COUNTS)
@settings(max_examples=20)
def test_the_order_is_a_function_of_settings_seed_and_epoch(chosen: LaneSettings, count: int) -> None:
    assume(count >= chosen.num_lanes or not chosen.is_even)

    def rows(chosen: LaneSettings, epoch: int) -> list[Any]:
        return [list(batch.rows()) for batch in batches_of(chosen, epoch, count)[0]]

    assert rows(chosen, 1) == rows(chosen, 1)
    if count >= 60 and chosen.batch_size > 1 and chosen.capacity >= 2 * chosen.batch_size:
        assert rows(chosen, 1) != rows(chosen, 2)
        assert rows(chosen, 1) != rows(replace(chosen, seed=chosen.seed + 1), 1)


@given(lane_settings(), EPOCHS, COUNTS, st.integers(1, 64))
@settings(max_examples=20)
def test_reading_ahead_does_not_change_the_order(chosen: LaneSettings, epoch: int, count: int, ahead: int) -> None:
    assume(count >= chosen.num_lanes or not chosen.is_even)
    batches, _ = batches_of(chosen, epoch, count)
    lanes = Lanes(chosen, epoch, order(count), count, read_ahead=ahead)
    assert [list(batch.rows()) for batch in lanes] == [list(batch.rows()) for batch in batches]


@given(lane_settings(is_even=False), COUNTS)
def test_no_more_items_are_resident_than_there_is_room(chosen: LaneSettings, count: int) -> None:
    batches, _ = batches_of(chosen, 0, count)
    due = due_uses(chosen, 0, count)
    live: dict[int, set[int]] = defaultdict(set)
    for number, batch in enumerate(batches):
        residents = live[number % chosen.num_lanes]
        residents.update(batch.positions.tolist())
        assert len(residents) <= chosen.capacity or chosen.batch_size < chosen.factor + 2
        residents -= {position for position, _, use, is_last in batch.rows() if is_last}
    if not chosen.drop_last and chosen.batch_size >= chosen.factor + 2:
        assert not any(live.values())
    assert max(due.values(), default=0) <= chosen.max_uses


@given(st.lists(st.integers(1, 2), max_size=60), st.integers(1, 7), st.integers(0, 20))
def test_lanes_are_dealt_one_of_each_round_and_sums_that_never_rise(
    uses: list[int], num_lanes: int, num_extra: int
) -> None:
    array = np.array(uses, dtype=np.int64)
    lanes, behind = deal(array, num_lanes, num_extra)
    assert sorted(place for places in lanes for place in places.tolist()) == list(range(len(uses)))
    num_rounds = len(uses) // num_lanes
    for places in lanes:
        assert [place // num_lanes for place in places.tolist()][:num_rounds] == list(range(num_rounds))
    rounds = [uses[start : start + num_lanes] for start in range(0, num_rounds * num_lanes, num_lanes)]
    extra = sum(in_round.count(2) for in_round in rounds if 1 in in_round)
    assert behind == num_extra + extra
    sums = [int(array[places[:num_rounds]].sum()) for places in lanes]
    turn = num_extra % num_lanes  # the lane from which on extra uses are dealt
    assert max(sums) - min(sums) <= 1
    assert sums[turn:] + sums[:turn] == sorted(sums, reverse=True)


def test_lanes_forget_items_after_their_last_use() -> None:
    class Example:
        pass

    alive: list[weakref.ref[Example]] = []

    def examples() -> Iterator[Example]:
        for _ in range(40):
            example = Example()
            alive.append(weakref.ref(example))
            yield example

    chosen = LaneSettings(
        factor=2.0,
        max_uses=2,
        batch_size=4,
        num_lanes=1,
        capacity=8,
        drop_last=False,
        is_even=False,
        is_open=False,
        seed=0,
    )
    lanes = Lanes(chosen, 0, examples())
    due: Counter[int] = Counter()
    for batch in lanes:
        due.update(batch.positions.tolist())
        del batch
        ended = [position for position, count in due.items() if count == 2]
        num_alive = sum(alive[position]() is not None for position in ended)
        assert num_alive < 4  # others that were dealt with them have yet to enter
    assert not any(reference() for reference in alive)
    assert len(due) == 40
