"""How many uses an item gets."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.echo.factor import default_max_factor, num_uses

FACTORS = st.floats(1, 20)
SEEDS = st.integers(-(2**63), 2**63)


@given(FACTORS, SEEDS, st.integers(0, 100))
def test_realised_factor_is_within_one_percent_over_10000_items(factor: float, seed: int, pass_index: int) -> None:
    mean = num_uses(factor, seed, pass_index, 0, 10_000).mean()
    assert mean == pytest.approx(factor, rel=0.01)


@given(FACTORS, SEEDS, st.integers(0, 10_000))
def test_every_item_has_floor_e_uses_or_one_more(factor: float, seed: int, start: int) -> None:
    uses = num_uses(factor, seed, 0, start, 100)
    assert set(uses.tolist()) <= {math.floor(factor), math.floor(factor) + 1}


@given(FACTORS, SEEDS, st.lists(st.integers(0, 40), max_size=8))
def test_uses_do_not_depend_on_how_items_are_grouped(factor: float, seed: int, sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes])
    pieces = [num_uses(factor, seed, 3, start, size) for start, size in zip(starts.tolist(), sizes, strict=False)]
    whole = num_uses(factor, seed, 3, 0, sum(sizes))
    assert np.concatenate([*pieces, np.empty(0)]).tolist() == whole.tolist()


@given(SEEDS)
def test_whole_factors_have_no_randomness(seed: int) -> None:
    assert num_uses(3.0, seed, 5, 17, 1000).tolist() == [3] * 1000


@pytest.mark.parametrize("at", [0, 1, 7, 15, 16, 100])
def test_each_item_has_one_more_use_with_probability_of_the_fraction(at: int) -> None:
    extra = sum(int(num_uses(2.3, seed, 0, at, 1)[0]) - 2 for seed in range(1500))
    assert extra / 1500 == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 1500))


@pytest.mark.parametrize(("seed", "pass_index"), [(1, 0), (0, 1)])
def test_another_seed_or_pass_gives_the_extra_use_to_other_items(seed: int, pass_index: int) -> None:
    assert num_uses(2.5, 0, 0, 0, 64).tolist() != num_uses(2.5, seed, pass_index, 0, 64).tolist()


@pytest.mark.parametrize(("batch_size", "max_factor"), [(1, 8), (4096, 8), (4097, 16)])
def test_default_max_factor_is_8_up_to_4096_examples_and_16_above(batch_size: int, max_factor: int) -> None:
    assert default_max_factor(batch_size) == max_factor
