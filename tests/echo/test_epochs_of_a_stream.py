"""carry_over=True: fresh batches are one stream over all passes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import stretto
from tests.echo.sources import Gated, Numbers, Rising, await_arrivals, epoch, flat, id_batches

FACTORS = st.one_of(st.sampled_from([1, 1.5, 2, 2.5, 4]), st.floats(1, 6))


@given(st.integers(1, 9), FACTORS)
def test_an_epoch_is_factor_times_len_updates_of_full_batches(num_batches: int, factor: float) -> None:
    with stretto.echo(id_batches(num_batches, 3), factor) as loader:
        assert len(loader) == max(1, round(factor * num_batches))
        for _ in range(3):
            assert [len(batch) for batch in epoch(loader)] == [3] * len(loader)
        assert loader.stats().epochs == 3


@pytest.mark.parametrize("unit", ["example", "batch"])
@pytest.mark.parametrize("factor", [1, 2.5, "auto"])
def test_updates_per_epoch_sets_another_length(factor: float, unit: str) -> None:
    with stretto.echo(id_batches(4, 3), factor, unit=unit, updates_per_epoch=7) as loader:
        assert len(loader) == 7
        assert [len(epoch(loader)) for _ in range(3)] == [7, 7, 7]


@given(
    batch_size=st.integers(1, 5),
    last=st.integers(1, 5),
    factor=FACTORS,
    room=st.integers(0, 40),
    seed=st.integers(0, 3),
)
def test_every_batch_holds_distinct_items_used_at_most_e_times_rounded_up(
    batch_size: int, last: int, factor: float, room: int, seed: int
) -> None:
    source = DataLoader(Numbers(3 * batch_size + min(last, batch_size)), batch_size)
    tagged = Rising(4, batch_size) if last == 5 else source
    with stretto.echo(tagged, factor, buffer=batch_size + room, updates_per_epoch=15, seed=seed) as loader:
        batches = epoch(loader) + epoch(loader)
        stats = loader.stats()
    assert all(len(batch) == batch_size for batch in batches)
    if tagged is not source:  # items of all passes differ
        assert all(len(set(batch)) == batch_size for batch in batches)
        assert max(Counter(flat(batches)).values()) <= -(-factor // 1)
    assert stats.duplicates == 0


@pytest.mark.parametrize("factor", [1.3, 2, 2.5, 4])
def test_realised_factor_of_a_long_run_is_the_one_asked_for(factor: float) -> None:
    with stretto.echo(id_batches(50, 20), factor, buffer=200, updates_per_epoch=round(500 * factor)) as loader:
        for _ in loader:
            pass
        before = loader.stats()
    after = loader.stats()
    assert before.uses == 20 * round(500 * factor)
    assert (after.uses + after.dropped_uses) / after.fresh_items == pytest.approx(factor, rel=0.01)


def test_a_loader_without_a_length_gives_epochs_that_follow_its_passes() -> None:
    with stretto.echo(Rising(6, 4), 2, buffer=16) as loader:
        with pytest.raises(TypeError, match="Rising has no length"):
            len(loader)
        epochs = [epoch(loader) for _ in range(3)]
        stats = loader.stats()
    assert stats.fresh_batches == 18
    assert {item // 1000 for item in flat(epochs[0])} == {0}
    assert {2} < {item // 1000 for item in flat(epochs[2])}  # carried over from earlier passes
    assert sum(len(batches) for batches in epochs) == stats.updates


def test_filling_starts_the_next_pass_early() -> None:
    with stretto.echo(id_batches(2, 4), 4, buffer=64) as loader:
        for at, _ in enumerate(loader):
            if at == 7:
                break
        assert loader.stats().passes == 1


def test_the_next_pass_is_fetched_while_the_epoch_goes_on() -> None:
    source = Gated(id_batches(2, 4))
    with stretto.echo(source, 1, buffer=4) as loader, source:
        source.release(4)
        assert flat(epoch(loader))
        iterator = iter(loader)
        await_arrivals(loader, 2)
        assert len([*iterator]) == 2


def test_what_is_resident_when_training_ends_is_dropped_and_counted() -> None:
    loader = stretto.echo(id_batches(3, 4), 5, updates_per_epoch=4)
    epoch(loader)
    stats = loader.stats()
    loader.close()
    assert stats.dropped_uses == 0
    assert loader.stats().dropped_uses == 5 * stats.fresh_items - stats.uses > 0
    assert loader.stats().resident_items == 0


@pytest.mark.parametrize("unit", ["example", "batch"])
def test_the_capacity_in_items_is_held(unit: str) -> None:
    batch_size = 5 if unit == "example" else 1
    capacity = 2 * batch_size + 1
    with stretto.echo(id_batches(7, 5), 4.5, unit=unit, buffer=capacity) as loader:
        assert max(loader.stats().resident_items for _ in loader) <= capacity


def test_no_more_than_one_batch_an_update_is_admitted_while_filling() -> None:
    with stretto.echo(id_batches(40, 4), 8, buffer=80) as loader:
        fresh = []
        for _ in loader:
            fresh.append(loader.stats().fresh_batches)
            if len(fresh) == 60:
                break
    steps = [after - before for before, after in zip([0, *fresh], fresh, strict=False)]
    assert set(steps) == {0, 1}
    # A fill rate of 1.5 / e: 3 fresh batches in 16 updates, the first at once.
    assert [fresh[at] for at in (0, 5, 6, 10, 11, 15, 16)] == [1, 1, 2, 2, 3, 3, 4]
