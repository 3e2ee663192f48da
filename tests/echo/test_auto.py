"""factor="auto": never wait while a batch of residents has uses left, admit whatever is ready."""

import threading
from typing import Any

import pytest
import torch

import stretto
from stretto import EchoLoader
from tests.echo.sources import Gated, flat, id_batches, let_arrive
from tests.patience import PATIENCE_S


def run(trace: list[int], **settings: Any) -> tuple[list[list[int]], EchoLoader]:
    """Updates under a scripted arrival trace: `trace[k]` batches arrive before update k."""
    source = Gated(id_batches(sum(trace) + 1, 4))
    batches = []
    with stretto.echo(source, "auto", **settings) as loader, source:
        iterator = iter(loader)
        for arrivals in trace:
            let_arrive(loader, source, arrivals)
            batches.append(next(iterator).tolist())
    return batches, loader


@pytest.mark.parametrize("max_factor", [1, 2, 8])
@pytest.mark.parametrize("unit", ["example", "batch"])
def test_one_batch_serves_exactly_max_factor_updates_without_waiting(unit: str, max_factor: int) -> None:
    source = Gated(id_batches(3, 4))
    with stretto.echo(source, "auto", unit=unit, max_factor=max_factor) as loader, source:
        source.release()
        iterator = iter(loader)
        for _ in range(max_factor):  # the source is stuck: an update that waited would fail
            assert sorted(next(iterator).tolist()) == [0, 1, 2, 3]
        batches: list[torch.Tensor] = []
        update = threading.Thread(target=lambda: batches.append(next(iterator)))
        update.start()
        assert loader.stats().resident_items == 0
        source.release()
        update.join(PATIENCE_S)
        assert sorted(batches[0].tolist()) == [4, 5, 6, 7]


def test_the_default_max_factor_is_8() -> None:
    batches, _ = run([1] + [0] * 7)
    assert len(batches) == 8


@pytest.mark.parametrize("ready", [2, 5])
def test_no_update_waits_while_a_batch_of_residents_has_uses_left(ready: int) -> None:
    """Until then at least `ready * max_factor - (max_factor - 1)` batches can be drawn: each wants 4 distinct."""
    source = Gated(id_batches(ready + 1, 4))
    with stretto.echo(source, "auto", max_factor=3) as loader, source:
        iterator = iter(loader)
        for _ in range(ready):
            let_arrive(loader, source, 1)
            next(iterator)
        while loader.stats().resident_items >= 4:
            batch = next(iterator).tolist()
            assert len(set(batch)) == 4
        assert loader.stats().fresh_batches == ready
        assert loader.stats().updates >= ready * 3 - 2


@pytest.mark.parametrize("buffer", [4, 8, 40, None])
def test_a_source_that_is_always_ready_is_used_once(buffer: int | None) -> None:
    trace = [1] * 60
    _, loader = run(trace, buffer=buffer)
    assert loader.stats().fresh_batches == 60
    assert loader.stats().factor == 1.0


@pytest.mark.parametrize("ratio", [2, 3, 5, 8])
def test_the_realised_factor_is_the_ratio_of_the_arrivals(ratio: int) -> None:
    _, loader = run(([1] + [0] * (ratio - 1)) * 25, buffer=40)
    assert loader.stats().factor == ratio


def test_a_source_that_comes_only_when_an_update_waits_is_used_max_factor_times() -> None:
    source = Gated(id_batches(20, 4))
    with stretto.echo(source, "auto", max_factor=3) as loader, source:
        iterator = iter(loader)
        for _ in range(30):
            if loader.stats().resident_items < 4:
                let_arrive(loader, source, 1)
            next(iterator)
        assert loader.stats().factor == 3.0


def test_a_bursty_source_is_admitted_at_once_and_lasts_through_the_stall() -> None:
    burst = [1] * 5 + [0] * 10
    batches, loader = run(burst * 6, buffer=80, max_factor=8)
    assert len(batches) == 90
    assert loader.stats().factor == 3.0
    assert all(len(set(batch)) == 4 for batch in batches)


def test_a_batch_that_is_ready_is_always_admitted_before_the_next_update() -> None:
    trace = [1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1]
    source = Gated(id_batches(20, 4))
    with stretto.echo(source, "auto", buffer=12) as loader, source:
        iterator = iter(loader)
        for at, arrivals in enumerate(trace):
            let_arrive(loader, source, arrivals)
            next(iterator)
            assert loader.stats().fresh_batches == sum(trace[: at + 1])
            assert loader.stats().resident_items <= 12


def test_an_item_is_never_replaced_before_its_first_use() -> None:
    batches, loader = run([1] * 50, buffer=12)
    unused = loader.stats().dropped_uses
    assert len(set(flat(batches))) == 4 * loader.stats().fresh_batches - unused
    assert unused <= 12


def test_a_fresh_batch_waits_while_room_would_cost_an_unused_item() -> None:
    """In a buffer of seven a fresh batch takes the place of a used one in the same update, or waits one."""
    source = Gated(id_batches(40, 4))
    with stretto.echo(source, "auto", buffer=7) as loader, source:
        iterator = iter(loader)
        source.release(30)
        for _ in range(20):
            let_arrive(loader, source, 0)
            before = loader.stats()
            next(iterator)
            after = loader.stats()
            assert after.fresh_batches - before.fresh_batches in (0, 1)
            assert after.resident_items <= 7
        assert 10 <= after.fresh_batches <= 20


def test_the_order_is_reproduced_under_the_same_arrivals() -> None:
    trace = [1, 0, 2, 0, 0, 1, 1, 0, 0, 0, 3, 0, 0, 1] * 3
    assert run(trace, buffer=20)[0] == run(trace, buffer=20)[0]
    assert run(trace, buffer=20)[0] != run(trace, buffer=20, seed=1)[0]


def test_it_has_no_length_unless_one_is_given() -> None:
    source = id_batches(4, 3)
    with pytest.raises(TypeError, match=r'factor="auto" has no length: an epoch is one pass'):
        len(stretto.echo(source, "auto"))
    with pytest.raises(TypeError, match="updates_per_epoch=N sets one"):
        len(stretto.echo(source, "auto", carry_over=False))
    assert len(stretto.echo(source, "auto", updates_per_epoch=9)) == 9


def test_an_epoch_is_one_pass() -> None:
    with stretto.echo(id_batches(7, 4), "auto") as loader:
        for number in range(1, 4):
            for _ in loader:
                pass
            assert loader.stats().fresh_batches == 7 * number
