"""Lightning, Accelerate and the Hugging Face Trainer (scripts/frameworks.py), alone, measured, and echoed."""

import pytest

from tests.launch.running import Done, run_in_all_ways

NAMES = ["lightning", "accelerate", "trainer"]
ECHOED = ["twice", "auto"]
VALIDATED = list(range(12))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    return run_in_all_ways(tmp_path_factory.mktemp("frameworks"), "frameworks.py")


def test_measuring_changes_no_weight(done: dict[str, Done]) -> None:
    assert [line["name"] for line in done["alone"].said] == NAMES
    assert done["measured"].said == done["alone"].said


@pytest.mark.parametrize("way", ["measured", *ECHOED])
def test_exactly_the_updates_are_counted(done: dict[str, Done], way: str) -> None:
    """Of 3 epochs of 24 batches; of 3 of 25 with gradients of two batches, 13 updates; of max_steps=60."""
    rank = done[way].rank
    assert rank["updates"] == rank["optimizer_steps"] == 3 * 24 + 3 * 13 + 60


@pytest.mark.parametrize("way", ECHOED)
def test_an_echoed_trainer_keeps_its_updates_its_batches_and_its_schedule(done: dict[str, Done], way: str) -> None:
    for alone, echoed in zip(done["alone"].said, done[way].said, strict=True):
        assert {**alone, "hash": ""} == {**echoed, "hash": ""}
        assert alone["hash"] != echoed["hash"]


@pytest.mark.parametrize("way", ["measured", *ECHOED])
def test_every_validation_sees_every_example_once(done: dict[str, Done], way: str) -> None:
    """Lightning's twice an epoch, after two batches that check the loop; the others' three."""
    lightning, accelerate, trainer = done[way].said
    assert lightning["validations"] == 7
    assert lightning["seen"] == VALIDATED[:8] + VALIDATED * 6
    assert accelerate["seen"] == trainer["seen"] == VALIDATED * 3
    for held in done[way].loaders("Held"):
        assert not held["is_training"]
        assert held["echo"] is None


@pytest.mark.parametrize("way", ECHOED)
@pytest.mark.parametrize("dataset", ["OfLightning", "OfAccelerate", "OfTrainer"])
def test_the_training_loader_is_echoed(done: dict[str, Done], way: str, dataset: str) -> None:
    (loader,) = done[way].loaders(dataset)
    assert loader["is_training"]
    assert loader["echo"] is not None
    assert loader["echo"]["unit"] == "example"
    if way == "twice":
        assert loader["echo"]["fresh_items"] < loader["echo"]["uses"]
