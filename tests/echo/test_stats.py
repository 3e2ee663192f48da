"""Statistics add up, and the clock counts each second once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import stretto
from stretto.echo.stats import Clock
from tests.echo.sources import Numbers, epoch, flat, id_batches


@given(
    unit=st.sampled_from(["example", "batch"]),
    factor=st.sampled_from([1, 2, 2.5, 6, "auto"]),
    carry_over=st.booleans(),
    num_updates=st.integers(0, 30),
)
def test_uses_are_those_done_dropped_and_still_due(
    unit: Any, factor: Any, carry_over: bool, num_updates: int
) -> None:
    loader = stretto.echo(id_batches(4, 3, last=2), factor, unit=unit, carry_over=carry_over, buffer=9)
    batches = []
    while len(batches) < num_updates:
        for batch in loader:
            batches.append(batch.tolist())
            if len(batches) >= num_updates:
                break
    loader.close()
    stats = loader.stats()
    assert stats.updates == len(batches)
    assert stats.uses == (len(flat(batches)) if unit == "example" else len(batches))
    assert stats.resident_items == 0
    assert stats.factor == (stats.uses / stats.fresh_items if batches else 0)
    assert stats.fresh_batches <= stats.fresh_items <= 3 * stats.fresh_batches
    if factor in (1, 2, 6):
        assert stats.uses + stats.dropped_uses == factor * stats.fresh_items


def test_counts_of_a_small_run_are_exact() -> None:
    with stretto.echo(id_batches(4, 5), 3, buffer=10) as loader:
        epoch(loader)
        stats = loader.stats()
    assert (stats.epochs, stats.updates, stats.uses, stats.duplicates, stats.dropped_uses) == (1, 12, 60, 0, 0)
    assert stats.fresh_items == 5 * stats.fresh_batches
    assert loader.stats().dropped_uses == 3 * stats.fresh_items - 60
    assert stats.passes == stats.fresh_batches // 4


@pytest.mark.parametrize(("factor", "lag"), [(1, 0), (2, 0.5), (5, 2)])
def test_the_lag_is_the_mean_number_of_updates_since_admission(factor: int, lag: float) -> None:
    with stretto.echo(id_batches(6, 4), factor, buffer=4, carry_over=False) as loader:
        epoch(loader)
        assert loader.stats().mean_lag_updates == lag


def test_the_pool_says_how_many_bytes_it_takes() -> None:
    with stretto.echo(id_batches(6, 4), 2, buffer=20) as loader:
        assert loader.stats().buffer_bytes == 0
        next(iter(loader))
        assert loader.stats().buffer_bytes == (20 + 4) * 8
        assert loader.stats().resident_items == 4


def test_statistics_survive_a_resume() -> None:
    with stretto.echo(id_batches(6, 4), 2, buffer=20) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state, before = loader.state_dict(), loader.stats()
    with stretto.echo(id_batches(6, 4), 2, buffer=20) as loader:
        loader.load_state_dict(state)
        after = loader.stats()
        assert (after.updates, after.uses, after.fresh_items) == (5, 20, before.fresh_items)
        assert after.mean_lag_updates == before.mean_lag_updates
        assert after.step_s == 0


class Watch:
    """A clock that the test winds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_the_clock_splits_time_into_wait_draw_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = Watch(), Clock()
    monkeypatch.setattr("time.perf_counter", watch.perf_counter)
    for draw, wait, rest, step in [(1, 32, 2, 5), (0, 0, 1, 7), (3, 8, 0, 0)]:
        clock.asked()
        watch.now += draw
        clock.drawn()
        watch.now += wait
        if wait:
            clock.waited()
        watch.now += rest
        clock.drawn()
        watch.now += step
    clock.ended()
    watch.now += 1000
    clock.asked()
    assert (clock.draw_s, clock.wait_s, clock.first_wait_s, clock.step_s) == (7, 40, 32, 12)


def test_shares_of_the_time_follow_mlperf_storage() -> None:
    with stretto.echo(id_batches(3, 2), 2) as loader:
        assert (loader.stats().au_percent, loader.stats().stall_percent, loader.stats().factor) == (0, 0, 0)
        epoch(loader)
        stats = loader.stats()
    assert stats.total_s == stats.wait_s + stats.draw_s + stats.step_s
    assert stats.au_percent == 100 * stats.step_s / stats.total_s
    assert stats.stall_percent == 100 * stats.wait_s / stats.total_s


def test_other_attributes_are_the_loaders() -> None:
    source = DataLoader(Numbers(10), 3, shuffle=True)
    with stretto.echo(source, 2) as loader:
        assert loader.dataset is source.dataset
        assert loader.sampler is source.sampler
        assert (loader.batch_size, loader.num_workers, loader.drop_last) == (3, 0, False)
        assert len(loader) == 8
        assert not hasattr(loader, "no_such_thing")
        with pytest.raises(AttributeError, match="no_such_thing"):
            loader.no_such_thing  # noqa: B018


def test_the_public_names_are_those_of_the_package() -> None:
    assert set(stretto.__all__) >= {"EchoLoader", "EchoStats", "echo"}
    assert isinstance(stretto.echo([1]), stretto.EchoLoader)
    assert isinstance(stretto.echo([1]).stats(), stretto.EchoStats)
