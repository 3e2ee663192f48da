"""EchoDataLoader on two ranks, without a trainer."""

from collections import Counter
from typing import Any

import pytest

from tests.echo.workers.torchrun import results_of, torchrun

SHARDED = pytest.mark.parametrize("name", ["sharded 0", "sharded 2"])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("ranks", tmp_path_factory.mktemp("ranks"))


def indices_of(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index, _ in batch]


@SHARDED
def test_each_rank_echoes_the_shard_of_its_distributed_sampler(ranks: list[dict[str, Any]], name: str) -> None:
    for epoch in range(3):
        counts = [Counter(indices_of(rank[name]["epochs"][epoch])) for rank in ranks]
        assert len(counts[0].keys() & counts[1].keys()) <= 1  # the sampler has one of 61 rows on both
        assert counts[0].keys() | counts[1].keys() == set(range(61))
        assert all(set(count.values()) == {3} for count in counts)
    assert [rank[name]["reads"] for rank in ranks] == [93, 93]


@SHARDED
def test_ranks_make_equally_many_updates_in_another_order_each_epoch(
    ranks: list[dict[str, Any]], name: str
) -> None:
    lengths = [[len(batches) for batches in rank[name]["epochs"]] for rank in ranks]
    assert lengths[0] == lengths[1]
    first, second, third = (indices_of(batches) for batches in ranks[0][name]["epochs"])
    assert set(first) != set(second) != set(third)


@SHARDED
def test_augmentation_differs_between_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    noises = [noise for rank in ranks for epoch in rank[name]["epochs"] for batch in epoch for _, noise in batch]
    assert len(set(noises)) == len(noises) == 2 * 3 * 93


@SHARDED
def test_each_rank_resumes_its_shard_exactly_from_any_rank_s_state(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        expected = rank[name]["epochs"][1][5:]
        assert rank[name]["rests"] == [expected, expected]


def test_uneven_parts_make_equally_many_updates_and_count_what_is_left_out(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["uneven"] for rank in ranks)
    assert [len(batches) for batches in first["epochs"]] == [len(batches) for batches in second["epochs"]]
    assert first["updates"] == second["updates"] == sum(map(len, first["epochs"]))
    assert (first["dropped_items"], second["dropped_items"]) == (2 * 21, 0)
    assert first["reads"] == second["reads"] == 2 * 49
    for epoch in range(2):
        assert len(set(indices_of(first["epochs"][epoch]))) == 49
        assert set(indices_of(second["epochs"][epoch])) == set(range(1000, 1049))
    assert set(indices_of(first["epochs"][0])) != set(indices_of(first["epochs"][1]))


def test_uneven_parts_resume_exactly(ranks: list[dict[str, Any]]) -> None:
    for seen in (rank["uneven"] for rank in ranks):
        assert seen["rest"] == seen["epochs"][1][4:]


def test_auto_agrees_on_the_slowest_rank_s_factor(ranks: list[dict[str, Any]]) -> None:
    for name, dropped in (("auto", (0, 0)), ("auto uneven", (80, 0))):
        first, second = (rank[name] for rank in ranks)
        assert first["updates"] == second["updates"]
        assert first["factors"] == second["factors"]
        assert all(1 < factor <= 4 for factor in first["factors"])
        assert first["num_examples"] == second["num_examples"] == [160, 160]
        assert (first["dropped_items"], second["dropped_items"]) == dropped


def test_auto_makes_equally_many_updates_where_examples_differ_in_size(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["auto by bytes"] == ranks[1]["auto by bytes"]
    assert ranks[0]["auto by bytes"][1] > 40


def test_state_of_another_rank_or_number_of_ranks_is_refused_with_both_values(
    ranks: list[dict[str, Any]],
) -> None:
    for number, rank in enumerate(ranks):
        of_rank, of_world = rank["refused"]
        assert f"saved with rank={1 - number}, this loader has rank={number}" in of_rank
        assert "saved with world_size=3, this loader has world_size=2" in of_world


def test_all_ranks_end_when_one_of_them_raises() -> None:
    done = torchrun("failing_rank")  # which does not wait as long as gloo does for a rank that has ended
    assert done.returncode != 0
    assert "OSError" in done.stderr
    assert "the disk under row 50 is gone" in done.stderr
    assert "In the data set, index 50" in done.stderr
