"""carry_over=False: an epoch is one pass, and every fresh item is used exactly its number of times."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import stretto
from stretto.echo.factor import num_uses
from tests.echo.sources import Numbers, Rising, epoch, flat, id_batches


@given(
    num_batches=st.integers(1, 9),
    batch_size=st.integers(1, 6),
    short_by=st.integers(0, 5),
    factor=st.sampled_from([1, 1.25, 2, 2.5, 3.9, 7]),
    room=st.integers(1, 40),
    seed=st.integers(0, 5),
)
def test_every_item_is_used_exactly_its_number_of_times_in_every_epoch(
    num_batches: int, batch_size: int, short_by: int, factor: float, room: int, seed: int
) -> None:
    last = max(1, batch_size - short_by) if num_batches > 1 else batch_size
    source = id_batches(num_batches, batch_size, last=last)
    num_items = (num_batches - 1) * batch_size + last
    with stretto.echo(source, factor, buffer=batch_size - 1 + room, carry_over=False, seed=seed) as loader:
        for pass_index in range(3):
            length = len(loader)
            batches = epoch(loader)
            uses = num_uses(factor, seed, pass_index, 0, num_items)
            assert Counter(flat(batches)) == dict(enumerate(uses.tolist()))
            assert len(batches) == length == math.ceil(uses.sum() / batch_size)
        stats = loader.stats()
    assert stats.dropped_uses == 0
    assert (stats.passes, stats.epochs, stats.fresh_items) == (3, 3, 3 * num_items)


@given(st.integers(1, 30), st.integers(1, 7), st.sampled_from([1, 1.5, 2, 3.3]), st.integers(1, 3))
def test_drop_last_leaves_out_less_than_a_batch_of_uses(
    num_items: int, batch_size: int, factor: float, buffer_batches: int
) -> None:
    batch_size = min(batch_size, num_items)
    source = DataLoader(Numbers(num_items), batch_size, shuffle=True, drop_last=True)
    with stretto.echo(source, factor, buffer=buffer_batches * batch_size, carry_over=False) as loader:
        for pass_index in range(2):
            length = len(loader)
            batches = epoch(loader)
            total = int(num_uses(factor, 0, pass_index, 0, num_items - num_items % batch_size).sum())
            assert [len(batch) for batch in batches] == [batch_size] * length
            assert length == total // batch_size
        assert loader.stats().dropped_uses < 2 * batch_size


def test_uses_left_out_by_drop_last_are_counted() -> None:
    source = DataLoader(Numbers(9), 3, drop_last=True)
    with stretto.echo(source, 1.5, carry_over=False) as loader:
        total = int(num_uses(1.5, 0, 0, 0, 9).sum())
        assert total % 3 != 0
        used = len(flat(epoch(loader)))
        assert loader.stats().dropped_uses == total - used == total % 3


@given(st.integers(1, 6), st.sampled_from([1, 2, 2.5, 5]), st.integers(1, 4), st.integers(0, 3))
def test_whole_batches_are_used_exactly_their_number_of_times(
    num_batches: int, factor: float, buffer: int, seed: int
) -> None:
    source = id_batches(num_batches, 2)
    with stretto.echo(source, factor, unit="batch", buffer=buffer, carry_over=False, seed=seed) as loader:
        length = len(loader)
        batches = epoch(loader)
    uses = num_uses(factor, seed, 0, 0, num_batches)
    assert Counter(batch[0] // 2 for batch in batches) == dict(enumerate(uses.tolist()))
    assert all(batch == [2 * (batch[0] // 2), 2 * (batch[0] // 2) + 1] for batch in batches)
    assert len(batches) == length == uses.sum()


@given(st.integers(1, 8), st.integers(1, 6), st.sampled_from([1, 2, 3.5, 6]), st.integers(1, 30))
def test_duplicates_appear_only_in_a_drain_and_are_counted(
    num_batches: int, batch_size: int, factor: float, room: int
) -> None:
    source = id_batches(num_batches, batch_size)
    with stretto.echo(source, factor, buffer=batch_size - 1 + room, carry_over=False) as loader:
        repeats = []
        for batch in loader:
            repeats.append(len(batch) - len(set(batch.tolist())))
            assert loader.stats().duplicates == sum(repeats)
            if loader.stats().passes == 0:  # the end of the pass has not been seen
                assert sum(repeats) == 0


def test_whole_factors_over_whole_batches_drain_without_duplicates() -> None:
    with stretto.echo(id_batches(8, 4), 3, carry_over=False) as loader:
        for batches in (epoch(loader), epoch(loader)):
            assert all(len(set(batch)) == 4 for batch in batches)


@pytest.mark.parametrize("buffer", [3, 7, None])
def test_an_epoch_left_early_drops_the_rest_of_its_pass(buffer: int | None) -> None:
    source = id_batches(5, 3)
    with stretto.echo(source, 2, buffer=buffer, carry_over=False) as loader:
        for _ in range(6):
            next(iter(loader))
        dropped = loader.stats().dropped_uses
        assert dropped == 5 * 3  # five epochs are left behind, each with 6 uses of 3 items, 3 of them done
        assert Counter(flat(epoch(loader))) == dict.fromkeys(range(15), 2)
        assert loader.stats().fresh_items == 6 * 3 + 15


def test_len_of_a_loader_that_does_not_tell_is_known_after_one_pass() -> None:
    with stretto.echo(Rising(3, 4), 2, carry_over=False) as loader:
        with pytest.raises(TypeError, match="Rising does not say how many examples a pass has"):
            len(loader)
        assert len(epoch(loader)) == len(loader) == 6


class NumberStream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


def test_an_iterable_dataset_keeps_its_items_exact() -> None:
    with stretto.echo(DataLoader(NumberStream(), 4), 2, carry_over=False) as loader:
        assert Counter(flat(epoch(loader))) == dict.fromkeys(range(10), 2)


def test_auto_uses_every_item_at_least_once_in_every_epoch() -> None:
    with stretto.echo(id_batches(9, 4, last=1), "auto", buffer=8, carry_over=False, max_factor=3) as loader:
        for _ in range(3):
            counts = Counter(flat(epoch(loader)))
            assert sorted(counts) == list(range(33))
            assert max(counts.values()) <= 3
        assert loader.stats().dropped_uses == 0
