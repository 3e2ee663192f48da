"""What is resident is bounded, and what comes out is nobody else's."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto.echo.buffer import Bound, TensorPool
from stretto.echo.plan import SLOT_BYTES
from tests.echo.sources import epoch, id_batches

UNITS = pytest.mark.parametrize("unit", ["example", "batch"])


@given(rows=st.integers(1, 40), width=st.integers(0, 30), spare=st.integers(0, 10_000))
def test_the_pool_stays_within_its_bytes(rows: int, width: int, spare: int) -> None:
    batch = (torch.zeros(rows, width), torch.zeros(rows, dtype=torch.uint8))
    batch_bytes = rows * (4 * width + 1)
    bound = 2 * batch_bytes + spare
    pool = TensorPool(batch, Bound(None, bound), None)
    memory = sum(leaf._pool.untyped_storage().nbytes() for leaf in pool._leaves)
    assert memory == pool.num_bytes <= bound
    assert bound < (pool.num_slots + 1) * (batch_bytes // rows + SLOT_BYTES)  # the plan's bookkeeping counts
    assert pool.capacity >= rows


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.sampled_from([1, 2.5, 5, "auto"]),
    st.integers(50, 300),
)
def test_whole_batches_of_varying_size_stay_within_their_bytes(sizes: list[int], factor: Any, bound: int) -> None:
    source = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    settings = {"unit": "batch", "buffer": f"{bound}B", "updates_per_epoch": 40}
    with stretto.echo(source, factor, **settings) as loader:
        for _ in loader:
            assert loader.stats().buffer_bytes <= bound
            resident = loader._stream.residents.buffer._batches.values()
            assert loader.stats().buffer_bytes == sum(batch.nbytes for batch, _ in resident)


def test_the_default_is_64_batches() -> None:
    for unit, num_items in (("example", 64 * 3), ("batch", 64)):
        with stretto.echo(id_batches(70, 3), 2, unit=unit, updates_per_epoch=400) as loader:
            most = max(loader.stats().resident_items for _ in range(3) for _ in loader)
        assert num_items - 3 <= most <= num_items


def test_the_default_is_at_most_one_gibibyte() -> None:
    huge = torch.zeros(1).expand(4, 5 << 20)  # four rows of 20 MiB
    pool = TensorPool(huge, None, torch.device("meta"))
    assert pool.num_bytes == (1 << 30) // ((20 << 20) + SLOT_BYTES) * (20 << 20)
    assert pool.capacity == pool.num_slots - 4


@UNITS
@pytest.mark.parametrize("factor", [3, "auto"])
def test_a_step_that_changes_its_batch_does_not_change_later_uses(unit: str, factor: Any) -> None:
    """Over several passes: not even what the loader itself holds and hands out again."""
    source = [{"x": torch.full((4, 2), float(at)), "y": torch.full((4,), at).numpy()} for at in range(3)]
    with stretto.echo(source, factor, unit=unit, updates_per_epoch=30) as loader:
        for batch in loader:
            assert batch["x"][:, 0].tolist() == batch["y"].tolist()
            assert set(batch["y"].tolist()) <= {0, 1, 2}
            batch["x"].mul_(2).add_(5)
            batch["y"] -= 9
    assert [batch["y"].tolist() for batch in source] == [[at] * 4 for at in range(3)]


@UNITS
def test_an_augmentation_in_place_does_not_change_later_uses(unit: str) -> None:
    def augment(batch: torch.Tensor) -> torch.Tensor:
        return batch.add_(100)

    with stretto.echo(id_batches(3, 2), 3, unit=unit, augment=augment, carry_over=False) as loader:
        assert all(100 <= item < 106 for batch in epoch(loader) for item in batch)


def test_without_copies_whole_batches_are_the_loaders_own() -> None:
    source = id_batches(3, 2)
    with stretto.echo(source, 2, unit="batch", copy=False) as loader:
        assert all(any(batch is own for own in source) for batch in loader)


@UNITS
def test_every_use_is_augmented_anew(unit: str) -> None:
    counter = iter(range(100))
    with stretto.echo(
        id_batches(3, 2), 2, unit=unit, augment=lambda batch: (batch, next(counter)), carry_over=False
    ) as loader:
        assert [number for _, number in loader] == list(range(6))


@UNITS
def test_the_buffer_is_on_the_device_that_is_asked_for(unit: str) -> None:
    with stretto.echo([torch.zeros(2, 3)] * 3, 2, unit=unit, device="meta") as loader:
        assert {batch.device.type for batch in loader} == {"meta"}


def test_the_plan_makes_its_slots_as_they_are_needed() -> None:
    with stretto.echo([torch.ones(4)] * 4, buffer="512MiB", updates_per_epoch=2) as loader:
        list(loader)
        assert len(loader._stream.residents._plan._left) == 1 << 16


def test_a_buffer_that_cannot_be_allocated_is_refused_with_its_size() -> None:
    source = [torch.ones(4, 1 << 20)] * 4
    with stretto.echo(source, buffer=1 << 40) as loader, pytest.raises(ValueError, match="cannot be allocated"):
        next(iter(loader))


def test_views_count_with_the_storage_they_keep_alive() -> None:
    source = [torch.ones(1000)[:4] for _ in range(9)]
    with stretto.echo(source, 4, unit="batch", buffer="10KB") as loader:
        for _ in loader:
            assert loader.stats().buffer_bytes == 4000 * loader.stats().resident_items <= 10_000


def test_sparse_batches_are_echoed_whole() -> None:
    source = [torch.eye(4).to_sparse() * number for number in range(3)]
    with stretto.echo(source, 2, unit="batch", carry_over=False) as loader:
        assert sorted(int(batch.to_dense().sum()) for batch in loader) == [0, 0, 4, 4, 8, 8]
        assert loader.stats().buffer_bytes == 0


def test_a_batch_that_cannot_be_copied_names_its_type_and_the_way_out() -> None:
    source = [threading.Lock() for _ in range(3)]
    with stretto.echo(source, unit="batch") as loader, pytest.raises(TypeError, match=r"type lock .*copy=False"):
        next(iter(loader))
    with stretto.echo(source, unit="batch", copy=False) as loader:
        assert next(iter(loader)) in source
