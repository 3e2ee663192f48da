"""The runs of the storage and those of the file, where both have some of a task."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.study import Outcome, Search
from stretto.study.records import append, read
from tests.study.toys import BEFORE, divide, failing, make_study, searched, timeless

ONLY = [BEFORE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a study was run to its end twice: "full", and with repeats that end at the target, "short"."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("full", "short"):
        searched(make_study(), folder / f"{name}.db", ONLY, to_budget=name == "full", runs=folder / f"{name}.jsonl")
    return folder


@pytest.fixture(scope="module")
def full(folder: Path) -> list[Outcome]:
    return searched(make_study(), folder / "full.db", ONLY)[0]


@pytest.fixture
def storage(folder: Path, tmp_path: Path) -> Path:
    """A storage whose repeats are short."""
    return Path(shutil.copy(folder / "short.db", tmp_path / "s.db"))


@pytest.fixture
def runs(folder: Path, tmp_path: Path) -> Path:
    """A file whose repeats are full."""
    return Path(shutil.copy(folder / "full.jsonl", tmp_path / "runs.jsonl"))


def test_full_repeats_of_the_file_count_in_place_of_short_ones(
    full: list[Outcome], storage: Path, runs: Path
) -> None:
    before = runs.read_bytes()
    (outcome,), seen = searched(make_study(), storage, ONLY, runs=runs)
    assert seen.begun == []
    assert outcome.repeats == full[0].repeats
    assert runs.read_bytes() == before  # the trials are as good there as here
    assert searched(make_study(), storage, ONLY, to_budget=False)[0][0].repeats == full[0].repeats


def test_a_run_of_the_file_that_did_not_crash_counts_in_place_of_one_that_did(
    full: list[Outcome], tmp_path: Path, runs: Path
) -> None:
    broken = make_study(failing(lambda settings, seed: seed == 101, divide))
    (outcome,), _ = searched(broken, tmp_path / "s.db", ONLY)
    assert [run.status for run in outcome.repeats] == ["reached", "crashed"]
    (repaired,), seen = searched(broken, tmp_path / "s.db", ONLY, runs=runs)
    assert seen.begun == []
    assert repaired.repeats == (outcome.repeats[0], full[0].repeats[1])


def test_a_file_of_short_repeats_gets_the_full_ones(folder: Path, storage: Path, tmp_path: Path) -> None:
    runs = Path(shutil.copy(folder / "short.jsonl", tmp_path / "short.jsonl"))
    full, seen = searched(make_study(), storage, ONLY)
    assert len(seen.begun) == 2
    for _ in range(2):
        assert searched(make_study(), storage, ONLY, runs=runs)[1].begun == []
        assert len(runs.read_text().splitlines()) == 4 + 2
    elsewhere, seen = searched(make_study(), tmp_path / "other.db", ONLY, runs=runs)
    assert (elsewhere, seen.begun) == (full, [])


def test_full_repeats_count_wherever_their_lines_are_in_the_file(
    full: list[Outcome], folder: Path, tmp_path: Path, runs: Path
) -> None:
    runs.write_text(runs.read_text() + (folder / "short.jsonl").read_text())
    merged, seen = searched(make_study(), tmp_path / "s.db", ONLY, runs=runs)
    assert seen.begun == []
    assert timeless(merged) == timeless(full)
    assert merged[0].repeats == full[0].repeats


def test_short_repeats_do_not_come_back_where_the_full_ones_crashed(
    folder: Path, storage: Path, tmp_path: Path
) -> None:
    runs = Path(shutil.copy(folder / "short.jsonl", tmp_path / "short.jsonl"))
    broken = make_study(failing(lambda settings, seed: seed == 101, divide))
    crashed, seen = searched(broken, storage, ONLY, runs=runs)
    assert len(seen.begun) == 2
    assert [run.status for run in crashed[0].repeats] == ["reached", "crashed"]
    again, seen = searched(broken, storage, ONLY, runs=runs)
    assert (again, seen.begun) == (crashed, [])


def test_crashes_do_not_come_back_while_they_are_made_again(full: list[Outcome], tmp_path: Path) -> None:
    storage, runs, study = tmp_path / "s.db", tmp_path / "runs.jsonl", make_study()
    searched(make_study(failing(lambda settings, seed: seed == 101, divide)), storage, ONLY, runs=runs)
    *_, crashed = read(runs, study.fingerprint)
    append(runs, study.fingerprint, replace(crashed, run=replace(crashed.run, updates=1)))  # on another machine
    with Search(study, ONLY, storage, trials=2, seeds=2, runs=runs) as search:
        search.retry_crashed()
    retried, seen = searched(study, storage, ONLY, runs=runs)
    assert [key.partition(", ")[2] for _, key in seen.begun] == ["seed 101"]
    assert timeless(retried) == timeless(full)


def test_settings_may_differ_by_what_another_machines_mathematics_rounds_otherwise(
    full: list[Outcome], tmp_path: Path, runs: Path
) -> None:
    lines = [json.loads(line) for line in runs.read_text().splitlines()]
    for line in lines:
        line["params"]["lr"] = math.nextafter(line["params"]["lr"], 1.0)
    runs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,), seen = searched(make_study(), tmp_path / "s.db", ONLY, runs=runs)
    assert seen.begun == []
    assert found.repeats[0].params["lr"] == math.nextafter(full[0].repeats[0].params["lr"], 1.0)
