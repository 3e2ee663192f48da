"""When the memorising guard warns, and when it does not."""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import stretto
from stretto.echo.gap import CHECK_EVERY, FIRST, LATER, WINDOW, EchoGap
from tests.echo.sources import Follower, Rising


def warned(gap: EchoGap, updates: Iterable[Any]) -> list[str]:
    """Texts of the warnings; each update has the losses of four first and four later uses in turn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for losses in updates:
            gap.handed_out(np.array([FIRST, LATER] * 4, np.int8), is_whole=False)
            gap.observe(losses)
    return [str(warning.message) for warning in caught]


def told(
    gap: EchoGap, num_updates: int, first: float, later: float, *, rise: float = 0.0, later_rise: float = 0.0
) -> list[str]:
    """Texts of the warnings; losses scatter a little."""
    rng = np.random.default_rng(0)
    means = (np.array([first + rise * at, later + later_rise * at] * 4) for at in range(num_updates))
    return warned(gap, (mean + rng.normal(0, 0.1, 8) for mean in means))


def test_a_large_gap_is_told_once_with_what_to_do() -> None:
    gap = EchoGap()
    assert told(gap, 2 * CHECK_EVERY - 1, 2.0, 0.5) == []
    (text,) = told(gap, 10 * CHECK_EVERY, 2.0, 0.5)
    assert "75% below" in text
    assert "Use a smaller factor, a larger buffer, or augmentation behind the echo" in text


@pytest.mark.parametrize(
    ("first", "later", "rise"),
    [(2.0, 1.2, 0), (2.0, 1.2, -0.001), (2.0, 1.95, 0.0001), (-1.0, -3.0, 0), (0.0, 0.0, 0)],
)
def test_a_healthy_gap_is_not_told_nor_one_of_losses_that_may_be_negative(
    first: float, later: float, rise: float
) -> None:
    assert told(EchoGap(), 10 * CHECK_EVERY, first, later, rise=rise) == []


def test_a_small_gap_is_told_if_the_loss_of_fresh_examples_rises() -> None:
    (text,) = told(EchoGap(), 10 * CHECK_EVERY, 2.0, 1.5, rise=0.001)
    assert "below that of fresh ones, which rises" in text


def test_a_small_gap_is_not_told_if_the_losses_of_all_uses_rise() -> None:
    assert told(EchoGap(), 10 * CHECK_EVERY, 2.0, 1.5, rise=0.001, later_rise=0.001) == []


@pytest.mark.parametrize("large_at", [(37,), (10, 160, 330)])
def test_a_gap_that_few_losses_make_is_not_told(large_at: tuple[int, ...]) -> None:
    gap, updates = EchoGap(), np.full((WINDOW, 8), 0.001)
    updates[large_at, 0] = 8
    assert warned(gap, updates) == []
    assert gap.gap is not None
    assert gap.gap > 0.8


def test_losses_below_zero_by_rounding_turn_no_warning_off() -> None:
    updates = np.tile([2.0, 0.5] * 4, (2 * CHECK_EVERY, 1))
    updates[30, 1] = -1e-9
    assert len(warned(EchoGap(), updates)) == 1


def test_the_warning_waits_until_no_loss_of_the_window_is_negative() -> None:
    gap = EchoGap()
    assert warned(gap, [[2.0, -0.5] * 4]) == []
    updates = np.tile([2.0, 0.5] * 4, (WINDOW, 1))
    assert warned(gap, updates[:-1]) == []
    assert len(warned(gap, updates[:CHECK_EVERY])) == 1


def test_the_warning_comes_through_the_loader() -> None:
    follower = Follower()
    with stretto.echo(Rising(60, 8), 4, buffer=32, updates_per_epoch=200) as loader:
        for update, batch in enumerate(loader, 1):
            losses = 1 - 3.6 * (1 - follower.losses(batch))
            if update < 200:
                loader.observe(losses)
        with pytest.warns(UserWarning, match="90% below") as caught:
            loader.observe(losses)
        assert caught[0].filename == __file__
