"""Finished runs in a file of lines."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from stretto.study import run
from stretto.study.records import Record, Task, append, best_of, read
from tests.study.toys import BASELINE, BEFORE, PARAMS, make_study

STUDY = make_study()


def made(task: Task) -> Record:
    return Record(task, run(STUDY, task.condition, PARAMS, task.seed))


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [made(Task(BASELINE, 0, 0)), made(Task(BEFORE, 2, 101, is_repeat=True))]


@pytest.fixture
def path(tmp_path: Path, records: list[Record]) -> Path:
    for record in records:
        append(tmp_path / "runs.jsonl", STUDY.fingerprint, record)
    return tmp_path / "runs.jsonl"


def test_runs_come_back_as_they_were_written(path: Path, records: list[Record]) -> None:
    assert read(path, STUDY.fingerprint) == records
    assert read(path.with_name("absent.jsonl"), STUDY.fingerprint) == []


def test_a_line_that_was_cut_off_is_passed_over_and_stays_apart_from_the_next(
    path: Path, records: list[Record]
) -> None:
    whole = path.read_bytes()
    for length in range(len(whole.splitlines()[0]) + 2, len(whole) - 1, 50):
        path.write_bytes(whole[:length])
        assert read(path, STUDY.fingerprint) == records[:1]
        append(path, STUDY.fingerprint, records[1])
        assert read(path, STUDY.fingerprint) == records


def test_of_a_tasks_runs_one_that_did_not_crash_counts_then_one_with_the_final_metric_then_the_later(
    records: list[Record],
) -> None:
    other, first = records
    worst_first = [
        Record(first.task, replace(first.run, status=status, final=final))
        for status, final in (("crashed", None), ("crashed", 1.5), ("missed", None), ("reached", 1.5))
    ]
    for count in range(1, 5):
        for order in permutations(worst_first[:count]):
            assert best_of([other, *order]) == {other.task: other, first.task: worst_first[count - 1]}
    for record in worst_first:
        again = Record(first.task, replace(record.run, seconds=0.5))
        assert best_of([record, again]) == {first.task: again}


def test_runs_of_another_study_are_refused_with_both_values(path: Path) -> None:
    other = make_study(target=2.0, batch_size=8)
    with pytest.raises(ValueError, match=r"runs.jsonl, line 1 belongs to another study") as caught:
        read(path, other.fingerprint)
    assert "target is 1.0 there and 2.0 here" in str(caught.value)
    assert "batch_size is 4 there and 8 here" in str(caught.value)


@pytest.mark.parametrize("text", ["accuracy 85\n", "[1, 2]\n", '{"seed": 3}\n', '{"version": 99, "study": {}}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.txt").write_text(text)
    with pytest.raises(ValueError, match=r"notes.txt, line 1.* is no run"):
        read(tmp_path / "notes.txt", STUDY.fingerprint)
