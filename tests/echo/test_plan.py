"""The plan: slots, uses and draws, without data."""

import copy
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stretto.echo.plan import Plan


def filled(uses: list[int], *, max_uses: int = 9, seed: int = 0) -> Plan:
    """A plan in which slot i has `uses[i]` uses left."""
    plan = Plan(len(uses), max_uses, seed)
    plan.admit(np.sort(plan.lend(len(uses))), np.array(uses))
    return plan


class PlanMachine(RuleBasedStateMachine):
    """A plan against a dict of slot -> uses left."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan(6, 5, seed=1)
        self.left: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.lent: list[np.ndarray] = []

    @rule(count=st.integers(0, 5))
    def lend(self, count: int) -> None:
        slots = self.plan.lend(count)
        assert len(set(slots.tolist())) == count
        assert not set(slots.tolist()) & self.left.keys()
        self.lent.append(slots)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        slots = self.lent.pop()
        uses = data.draw(st.lists(st.integers(1, 5), min_size=len(slots), max_size=len(slots)))
        self.plan.admit(slots, np.array(uses, dtype=np.int64))
        self.left |= dict(zip(slots.tolist(), uses, strict=True))
        self.born |= dict.fromkeys(slots.tolist(), self.plan.num_updates)

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self) -> None:
        self.plan.give_back(self.lent.pop(0))

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def draw(self, data: st.DataObject) -> None:
        drawn = self.plan.draw(data.draw(st.integers(1, len(self.left))))
        slots = drawn.slots.tolist()
        assert len(set(slots)) == len(slots)
        assert drawn.num_duplicates == 0
        self.use(slots, drawn.freed.tolist(), drawn.sum_lag)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def draw_most_left(self, data: st.DataObject) -> None:
        count, num_updates = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
        spare = sum(max(0, left - num_updates) for left in self.left.values())
        drawn = self.plan.draw_most_left(count, num_updates)
        slots = drawn.slots.tolist()
        assert len(slots) == min(count, len(self.left) + spare)
        assert drawn.num_duplicates == len(slots) - len(set(slots))
        self.use(slots, drawn.freed.tolist(), drawn.sum_lag)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        used = sorted((left, self.born[slot]) for slot, left in self.left.items() if left < 5)
        freed = self.plan.evict(count)
        if freed is None:
            assert len(used) < count
            return
        assert sorted((self.left.pop(slot), self.born[slot]) for slot in freed.tolist()) == used[:count]

    def use(self, slots: list[int], freed: list[int], sum_lag: int) -> None:
        assert sum_lag == sum(self.plan.num_updates - 1 - self.born[slot] for slot in slots)
        for slot, times in Counter(slots).items():
            self.left[slot] -= times
            assert self.left[slot] >= 0
        assert sorted(freed) == sorted(slot for slot in set(slots) if self.left[slot] == 0)
        for slot in freed:
            del self.left[slot]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert sorted(self.plan.live.tolist()) == sorted(self.left)
        assert self.plan.uses_left == sum(self.left.values())
        assert self.plan.num_unused == sum(left == 5 for left in self.left.values())


TestPlanMachine = PlanMachine.TestCase
TestPlanMachine.settings = settings(max_examples=40, stateful_step_count=30)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=24), st.integers(1, 8))
def test_a_drain_repeats_in_a_batch_only_uses_beyond_the_updates_left(uses: list[int], batch_size: int) -> None:
    plan = filled(uses)
    num_updates = -(-sum(uses) // batch_size)
    duplicates = 0
    for left in range(num_updates, 0, -1):
        duplicates += plan.draw_most_left(batch_size, left).num_duplicates
    assert plan.uses_left == 0
    assert duplicates == sum(max(0, left - num_updates) for left in uses)


def test_a_drain_draws_the_residents_with_the_most_uses_left_first() -> None:
    plan = filled([1, 3, 2, 3, 1, 2])
    assert set(plan.draw_most_left(3, 4).slots.tolist()) in ({1, 3, 2}, {1, 3, 5})


@pytest.mark.parametrize(("num_live", "count"), [(6, 2), (6, 5), (40, 3), (5, 1)])
def test_draws_are_uniform_over_ordered_pairs_of_residents(num_live: int, count: int) -> None:
    num_draws = 4000
    plan = filled([10**6] * num_live, max_uses=10**6)
    drawn = [plan.draw(count).slots.tolist() for _ in range(num_draws)]
    places = Counter((place, slot) for slots in drawn for place, slot in enumerate(slots))
    expected = num_draws / num_live
    chi_square = sum((places[p, s] - expected) ** 2 / expected for p in range(count) for s in range(num_live))
    freedom = count * (num_live - 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_evict_takes_the_most_used_the_oldest_among_equals() -> None:
    plan = Plan(8, 4, seed=0)
    for left in (3, 1, 3, 1, 3):
        plan.admit(plan.lend(1), left)
        plan.num_updates += 1
    oldest_first = plan.live.tolist()
    freed = plan.evict(3)
    assert freed is not None
    assert set(freed.tolist()) == {oldest_first[at] for at in (1, 3, 0)}


def test_evict_never_takes_an_unused_one() -> None:
    plan = filled([4, 4, 3], max_uses=4)
    assert plan.evict(2) is None
    assert plan.num_live == 3
    assert plan.evict(1).tolist() == [2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 5), st.integers(0, 2**32))
def test_a_restored_plan_draws_what_the_saved_one_does(uses: list[int], num_draws: int, seed: int) -> None:
    plan = filled(uses, seed=seed)
    for _ in range(num_draws):
        if plan.num_live:
            plan.draw(1 + plan.num_live // 2)
    restored = Plan(len(uses) + 3, 9, seed)
    slots = restored.load_state_dict(copy.deepcopy(plan.state_dict()))
    twin = dict(zip(slots.tolist(), plan.live.tolist(), strict=True))
    while plan.num_live:
        count = 1 + plan.num_live // 3
        mine, other = plan.draw(count), restored.draw(count)
        assert mine.slots.tolist() == [twin[slot] for slot in other.slots.tolist()]
        assert mine.sum_lag == other.sum_lag


def test_orders_differ_between_seeds() -> None:
    orders = {tuple(filled([1] * 32, seed=seed).draw(32).slots.tolist()) for seed in range(8)}
    assert len(orders) == 8
