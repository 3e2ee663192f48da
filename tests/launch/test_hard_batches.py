"""With --echo, what cannot be echoed is left as it is: the script's updates and evaluations are its own."""

import json

import pytest

from tests.launch.running import Done, run_alone, run_measured

NAMES = [
    "an empty batch",
    "a wider batch",
    "only empty batches",
    "generators",
    "restless",
    "a stream that is shorter",
    "a stream that is longer",
    "a stream without length",
    "a loader that is shorter",
]


@pytest.fixture(scope="module")
def alone() -> Done:
    return run_alone("hard.py")


@pytest.fixture(scope="module")
def echoed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run_measured(tmp_path_factory.mktemp("hard"), "hard.py", options=("--echo", "2"))


def said(done: Done, name: str) -> dict[str, list]:
    assert done.code == 0, done.err
    (line,) = (line for line in done.said if line["name"] == name)
    return line


@pytest.mark.parametrize("name", NAMES)
def test_updates_and_evaluations_are_those_of_the_script_alone(alone: Done, echoed: Done, name: str) -> None:
    expected, found = said(alone, name), said(echoed, name)
    assert expected["updates"] == [10, 10, 10]
    assert found["updates"] == expected["updates"]
    is_changed_by_echo = name == "an empty batch"  # which is in the first epoch, or in its evaluation
    if not is_changed_by_echo:
        assert found["evaluated"] == expected["evaluated"]


def test_what_was_echoed_and_why_not(echoed: Done) -> None:
    found = dict(zip(NAMES, echoed.rank["loaders"], strict=True))
    units = {name: loader["echo"] and loader["echo"]["unit"] for name, loader in found.items()}
    assert units == {
        "an empty batch": "example",
        "a wider batch": "batch",
        "only empty batches": None,
        "generators": None,
        "restless": None,
        "a stream that is shorter": "example",
        "a stream that is longer": "example",
        "a stream without length": "example",
        "a loader that is shorter": "example",
    }
    reasons = {name: loader["why_not_echoed"] for name, loader in found.items() if loader["why_not_echoed"]}
    assert reasons.keys() == {"only empty batches", "generators", "restless"}
    assert "0 examples" in reasons["only empty batches"]
    assert "cannot pickle 'generator' object" in reasons["generators"]
    assert "not to be copied" in reasons["restless"]
    assert all(reason in json.dumps(echoed.record["findings"]) for reason in ("0 examples", "not to be copied"))
