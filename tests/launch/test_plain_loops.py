"""Loops of many forms (scripts/loops.py), by themselves, measured, and echoed."""

from typing import Any

import pytest

from tests.launch.running import Done, run_in_all_ways
from tests.launch.scripts.loops import BATCH, EXAMPLES, LOOPS

NAMES = [loop.__name__ for loop in LOOPS]
ECHOED = ["twice", "auto"]
DATASETS = {
    "renewed": "Renewed",
    "plain": "Plain",
    "stateful": "Stateful",
    "spawned": "Spawned",
    "endless": "Endless",
    "gan": "Gan",
    "lbfgs": "Lbfgs",
    "multi_epochs": "MultiEpochs",
    "generator": "Generator",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    return run_in_all_ways(tmp_path_factory.mktemp("loops"), "loops.py")


def said(done: Done, name: str) -> dict[str, Any]:
    (line,) = [line for line in done.said if line["name"] == name]
    return line


def test_measuring_changes_no_loss_no_weight_and_no_word(done: dict[str, Done]) -> None:
    assert [line["name"] for line in done["alone"].said] == NAMES
    assert done["measured"].out == done["alone"].out


def test_exactly_the_updates_are_counted(done: dict[str, Done]) -> None:
    updates = sum(line["updates"] for line in done["alone"].said)
    for way in ("measured", *ECHOED):
        rank = done[way].rank
        assert rank["updates"] == updates
        assert rank["optimizer_steps"] == updates + said(done["alone"], "gan")["updates"]
        assert rank["ended"] == "finished"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ECHOED)
def test_an_echoed_loop_keeps_its_updates_its_epochs_and_its_schedule(
    done: dict[str, Done], way: str, name: str
) -> None:
    alone, echoed = said(done["alone"], name), said(done[way], name)
    for key in ("updates", "epochs", "lr"):
        assert echoed[key] == alone[key]


@pytest.mark.parametrize("way", ECHOED)
def test_every_validation_sees_every_example_once(done: dict[str, Done], way: str) -> None:
    """Over loaders of its own, and under no_grad over the very loader that is echoed."""
    for name in NAMES:
        alone, echoed = said(done["alone"], name)["seen"], said(done[way], name)["seen"]
        assert [sorted(seen) for seen in echoed] == [sorted(seen) for seen in alone]
    for held in done[way].loaders("Held"):
        assert not held["is_training"]
        assert held["echo"] is None


@pytest.mark.parametrize("way", ECHOED)
def test_zipped_loaders_stay_aligned(done: dict[str, Done], way: str) -> None:
    assert said(done[way], "zipped")["aligned"]


def test_zipped_loaders_are_echoed_alike(done: dict[str, Done]) -> None:
    (left,), (right,) = done["twice"].loaders("Left"), done["twice"].loaders("Right")
    assert left["echo"] is not None
    assert left["echo"] == right["echo"]
    assert left["echo"]["unit"] == "batch"


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("way", ECHOED)
def test_training_loaders_are_echoed(done: dict[str, Done], way: str, name: str) -> None:
    trained = [loader for loader in done[way].loaders(DATASETS[name]) if loader["is_training"]]
    assert len(trained) == (3 if name == "renewed" else 1)
    for loader in trained:
        assert loader["echo"] is not None
        assert loader["echo"]["unit"] == "example"
        assert loader["why_not_echoed"] is None


def test_a_long_run_reads_about_half_and_uses_all_of_it_twice(done: dict[str, Done]) -> None:
    (loader,) = [loader for loader in done["twice"].loaders("Plain") if loader["is_training"]]
    echo, updates = loader["echo"], said(done["alone"], "plain")["updates"]
    assert echo is not None
    assert echo["began_at_update"] == said(done["alone"], "renewed")["updates"] + 2
    assert echo["uses"] == (updates - 2) * BATCH
    buffered = 64 * BATCH
    assert echo["uses"] / 2 <= echo["fresh_items"] <= echo["uses"] / 2 + buffered
    assert echo["realised"] == pytest.approx(2, abs=0.15)
    assert said(done["twice"], "plain")["examples"] == EXAMPLES


def test_loaders_that_the_script_drops_leave_no_workers(done: dict[str, Done]) -> None:
    assert [said(done[way], "renewed")["workers"] for way in done] == [0, 0, 0, 0]
