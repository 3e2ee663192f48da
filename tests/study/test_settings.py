"""The learning rate of every update."""

import math

import pytest

from stretto.study import Condition
from stretto.study.points import at_edge, point
from stretto.study.settings import make_settings
from tests.study.toys import BASELINE, BEFORE, PARAMS, make_study


def test_the_rate_falls_to_a_hundredth_in_the_share_of_the_updates_that_the_budget_allows() -> None:
    settings = make_settings(make_study(), BEFORE, PARAMS, spent=lambda: 0.0)
    assert (settings.max_updates, settings.decay_updates) == (4 * 200 // 4, 100)
    assert settings.rate(0) == settings.lr == 0.1
    assert settings.rate(50) == pytest.approx(0.1 * (1 - 0.99 / 2))
    assert settings.rate(100) == settings.rate(10_000) == pytest.approx(0.001)
    assert make_settings(make_study(), BASELINE, PARAMS, spent=lambda: 0.0).max_updates == 50


def test_under_auto_the_rate_goes_by_what_was_read() -> None:
    read = [0.0]
    condition = Condition("before", "auto", 4, 4)
    settings = make_settings(make_study(), condition, PARAMS, spent=lambda: read[0])
    assert settings.rate(1000) == 0.1
    read[0] = 0.25
    assert settings.rate(3) == pytest.approx(0.1 * (1 - 0.99 / 2))
    read[0] = 1.0
    assert settings.rate(4) == pytest.approx(0.001)


def test_further_settings_are_found_by_name() -> None:
    study = make_study(search={"weight_decay": (1e-5, 1e-3)})
    settings = make_settings(study, BASELINE, point(study, 0), spent=lambda: 0.0)
    assert settings["weight_decay"] == pytest.approx(1e-4)
    with pytest.raises(KeyError, match=r"'momentum' is not searched: .* \(weight_decay\)"):
        settings["momentum"]


def test_a_point_of_another_search_space_is_refused() -> None:
    with pytest.raises(ValueError, match="params are lr, decay: expected lr, decay, momentum"):
        make_settings(make_study(search={"momentum": (0.5, 0.9)}), BASELINE, PARAMS, spent=lambda: 0.0)


def test_the_first_point_is_the_middle_and_all_follow_from_their_number() -> None:
    study = make_study(lr=(0.01, 1.0), decay=(0.2, 1.0))
    assert point(study, 0) == {"lr": pytest.approx(0.1), "decay": pytest.approx(0.6)}
    places = [math.log(point(study, number)["lr"] / 0.01) / math.log(100) for number in range(9)]
    # In base 3, shifted by a half: the middles of three thirds, then of nine ninths.
    assert places[:3] == pytest.approx([1 / 2, 5 / 6, 1 / 6])
    assert sorted(places) == pytest.approx([(1 / 2 + k) / 9 for k in range(9)])
    shares = sorted(point(study, number)["decay"] for number in range(5))
    assert shares == pytest.approx([0.2 + 0.8 * (1 / 2 + k) / 5 for k in range(5)])


def test_a_range_with_equal_ends_is_a_fixed_setting() -> None:
    study = make_study(lr=(0.3, 0.3))
    assert {point(study, number)["lr"] for number in range(5)} == {0.3}
    assert at_edge(study, {"lr": 0.3, "decay": 0.5}) == []


def test_a_value_in_the_outer_fifth_of_its_range_is_said_to_be_at_the_edge() -> None:
    study = make_study(lr=(0.01, 1.0), decay=(0.2, 0.9))
    assert at_edge(study, {"lr": 0.026, "decay": 0.35}) == []
    assert at_edge(study, {"lr": 0.024, "decay": 0.32}) == [
        "lr = 0.024 is at the lower end of its range, 0.01 .. 1",
        "decay = 0.32 is at the lower end of its range, 0.2 .. 0.9",
    ]
    assert at_edge(study, {"lr": 0.7, "decay": 0.8}) == [
        "lr = 0.7 is at the upper end of its range, 0.01 .. 1",
        "decay = 0.8 is at the upper end of its range, 0.2 .. 0.9",
    ]


def test_a_decay_over_the_whole_budget_is_at_no_edge() -> None:
    study = make_study(lr=(0.01, 1.0), decay=(0.2, 1.0))
    assert at_edge(study, {"lr": 0.1, "decay": 0.99}) == []
