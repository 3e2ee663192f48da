"""Several processes that train: under torchrun, and such as a script starts itself."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from tests.launch.running import SCRIPTS, Done, run_measured, stretto_run

RANKS = str(SCRIPTS / "ranks.py")
HOW = ["--standalone", "--nproc-per-node", "2", RANKS]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    folders = [tmp_path_factory.mktemp("ranks") for _ in range(3)]
    module = [sys.executable, "-m", "torch.distributed.run", *HOW]
    with ThreadPoolExecutor(2) as pool:
        runs = {
            "torchrun": pool.submit(stretto_run, folders[0], ["torchrun", *HOW]),
            "echoed": pool.submit(stretto_run, folders[1], module, "--echo", "2"),
            "forks": pool.submit(run_measured, folders[2], "forks.py", options=("--echo", "2")),
        }
        return {name: run.result() for name, run in runs.items()}


@pytest.mark.parametrize("way", ["torchrun", "echoed"])
def test_the_ranks_of_torchrun_are_merged_and_take_equally_many_updates(done: dict[str, Done], way: str) -> None:
    assert done[way].code == 0, done[way].err
    record = done[way].record
    assert record is not None
    assert [line["updates"] for line in done[way].said] == [60, 60]
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert [rank["world_size"] for rank in record["ranks"]] == [2, 2]
    assert [rank["updates"] for rank in record["ranks"]] == [60, 60]
    assert [rank["ended"] for rank in record["ranks"]] == ["finished", "finished"]


def test_the_rank_whose_data_is_slow_is_named(done: dict[str, Done]) -> None:
    record = done["torchrun"].record
    assert record is not None
    assert record["straggler"] is not None
    assert record["straggler"].startswith("rank 1 waits")
    assert record["straggler"] in done["torchrun"].err.replace("\n", " ")


def test_each_rank_echoes_its_own_part(done: dict[str, Done]) -> None:
    record = done["echoed"].record
    assert record is not None
    loaders = list(chain.from_iterable(rank["loaders"] for rank in record["ranks"]))
    assert [loader["echo"]["fresh_items"] for loader in loaders if loader["echo"]] == [172, 172]
    zero, one = (set(line["used"]) for line in done["echoed"].said)
    assert zero
    assert one


def test_every_process_that_trains_is_recorded_however_it_was_started(done: dict[str, Done]) -> None:
    """One epoch of 16 batches in the first, two in the second, three in the third; an idle one is left out."""
    assert done["forks"].code == 0, done["forks"].err
    record = done["forks"].record
    assert record is not None
    assert sorted(rank["updates"] for rank in record["ranks"]) == [16, 32, 48]
    assert [rank["ended"] for rank in record["ranks"]] == ["finished"] * 3
    for rank in record["ranks"]:
        (loader,) = rank["loaders"]
        assert loader["echo"] is not None
        assert loader["echo"]["uses"] == (rank["updates"] - 2) * 2
