"""Which loaders are training loaders, and which of those are echoed (scripts/recognition.py)."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stretto.profile.schema import LoaderRecord
from tests.launch.running import Done, run_alone, run_measured

ALL = list(range(48))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    folder = tmp_path_factory.mktemp("recognition")
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(run_alone, "recognition.py", "fail")
        measured = pool.submit(run_measured, folder, "recognition.py", "fail")
        runs = {"alone": alone.result(), "measured": measured.result()}
    return {**runs, "twice": run_measured(folder, "recognition.py", options=("--echo", "2"))}


def said(done: Done, name: str) -> dict[str, Any]:
    (line,) = [line for line in done.said if line["name"] == name]
    return line


def loader(done: Done, dataset: str) -> LoaderRecord:
    (only,) = done.loaders(dataset)
    return only


def test_a_measured_script_says_the_same_with_the_traceback_of_an_example_that_fails(done: dict[str, Done]) -> None:
    """An iterator that is alive at the script's end adds nothing to its stderr."""
    assert "OSError: example 0 cannot be read" in done["alone"].err
    assert done["measured"].out == done["alone"].out
    assert done["measured"].err.startswith(done["alone"].err)
    assert done["measured"].code == done["alone"].code == 1
    assert done["measured"].rank["ended"] == "raised OSError: example 0 cannot be read"


def test_an_echoed_loop_that_breaks_out_of_its_epochs_keeps_their_updates(done: dict[str, Done]) -> None:
    assert said(done["twice"], "broken")["updates"] == [5, 5, 5, 5]
    echo = loader(done["twice"], "Broken")["echo"]
    assert echo is not None
    assert echo["uses"] == (20 - 2) * 4


def test_a_validation_with_gradients_but_without_a_step_is_none_of_training(done: dict[str, Done]) -> None:
    assert said(done["twice"], "checked")["seen"] == [ALL, ALL, ALL]
    held = loader(done["twice"], "Checked")
    assert not held["is_training"]
    assert held["echo"] is None
    assert loader(done["twice"], "Trained")["echo"] is not None


@pytest.mark.parametrize("name", ["ragged", "later_ragged"])
def test_batches_that_cannot_be_taken_apart_are_echoed_as_they_are(done: dict[str, Done], name: str) -> None:
    """Also where that is found out in the middle of a run."""
    assert said(done["twice"], name)["updates"] == [12, 12, 12]
    dataset = {"ragged": "Ragged", "later_ragged": "LaterRagged"}[name]
    echo = loader(done["twice"], dataset)["echo"]
    assert echo is not None
    assert echo["unit"] == "batch"


def test_batches_that_raise_at_every_look_are_left_as_they_are(done: dict[str, Done]) -> None:
    for way in ("measured", "twice"):
        assert said(done[way], "odd")["used"] == ALL + ALL
    only = loader(done["twice"], "Odd")
    assert only["echo"] is None
    assert only["why_not_echoed"] == "its batches cannot be looked at: Peculiar: ndim is not known"


def test_a_loader_without_a_length_is_left_as_it_is_in_its_first_pass(done: dict[str, Done]) -> None:
    assert said(done["twice"], "stream")["used"] == ALL
    only = loader(done["twice"], "Stream")
    assert only["is_training"]
    assert only["echo"] is None
    assert only["why_not_echoed"] is not None
    assert only["why_not_echoed"].startswith("how long a pass is was not known before one was over")
    assert done["twice"].record is not None
    assert f"DataLoader was not echoed: {only['why_not_echoed']}" in done["twice"].record["findings"]


@pytest.mark.parametrize(
    ("name", "dataset", "kind", "unit"),
    [("by_hand", "ByHand", "EchoLoader", "example"), ("in_workers", "InWorkers", "EchoDataLoader", "workers")],
)
@pytest.mark.parametrize("way", ["measured", "twice"])
def test_an_echo_of_the_scripts_own_is_measured_and_not_echoed_again(
    done: dict[str, Done], way: str, name: str, dataset: str, kind: str, unit: str
) -> None:
    alone = said(done["alone"], name)
    assert said(done[way], name) == alone
    (own,) = [one for one in done[way].loaders(dataset) if one["is_training"]]
    assert own["name"] == kind
    assert own["echo"] is not None
    assert (own["echo"]["unit"], own["echo"]["factor"]) == (unit, 3)
    assert own["echo"]["uses"] == sum(alone["updates"]) * 4
    assert own["why_not_echoed"] == ("it echoes already" if way == "twice" else None)


def test_every_pass_of_an_echoed_loader_without_workers_is_timed(done: dict[str, Done]) -> None:
    """Also those that the script does not begin itself."""
    for way in ("measured", "twice"):
        record = done[way].record
        assert record is not None
        stages = [stage for one in done[way].rank["loaders"] for stage in one["stages"]]
        assert {stage["name"] for stage in stages} == {"read", "collate"}
        for stage in stages:
            assert 0 < stage["wall_ms"] < record["seconds"] * 1e3
