"""The protocol: which runs are made, by whom, and what is left of a study that was ended."""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from stretto.study import MakeLoader, Outcome, Run, Search, Settings, TrainError, Watcher
from stretto.study.points import point
from stretto.study.processes import Job
from stretto.study.records import Task
from stretto.study.storage import objective
from tests.forked import python
from tests.study.toys import (
    BASELINE,
    BEFORE,
    CONDITIONS,
    WORKERS,
    Seen,
    augment,
    divide,
    failing,
    loader_of,
    make_study,
    searched,
    timeless,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a study was run to its end."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[list[Outcome], Seen]:
    return searched(make_study(), folder / "s.db", runs=folder / "runs.jsonl")


def test_every_condition_has_the_same_trials_and_its_best_is_repeated(whole: tuple[list[Outcome], Seen]) -> None:
    outcomes, seen = whole
    study = make_study()
    for condition, outcome in zip(CONDITIONS, outcomes, strict=True):
        assert outcome.is_done
        assert [dict(run.params) for run in outcome.trials] == [point(study, number) for number in range(2)]
        assert outcome.best is not None
        assert min(run.fresh_examples for run in outcome.trials) == outcome.trials[outcome.best].fresh_examples
        assert [run.seed for run in outcome.repeats] == [100, 101]
        assert all(run.params == outcome.trials[outcome.best].params for run in outcome.repeats)
        assert all(run.final is not None for run in outcome.repeats)
        assert [key for of, key in seen.begun if of == condition] == [
            *("trial 0", "trial 1"),
            *(f"trial {outcome.best}, seed {seed}" for seed in (100, 101)),
        ]


def test_a_study_that_is_done_is_not_run_again_and_can_be_made_larger(
    whole: tuple[list[Outcome], Seen], folder: Path, tmp_path: Path
) -> None:
    storage = shutil.copy(folder / "s.db", tmp_path)
    again, seen = searched(make_study(), Path(storage))
    assert (again, seen.begun) == (whole[0], [])
    larger, seen = searched(make_study(), Path(storage), trials=3, seeds=3)
    assert [outcome.trials[:2] for outcome in larger] == [outcome.trials for outcome in again]
    made = [key for of, key in seen.begun if of == BEFORE]
    assert made[0] == "trial 2"
    assert made[-1] == f"trial {larger[1].best}, seed 102"


def test_a_study_whose_process_was_killed_goes_on_and_ends_the_same(
    whole: tuple[list[Outcome], Seen], tmp_path: Path
) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from stretto.study import Search, Watcher
from tests.study.toys import CONDITIONS, failing, make_study
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
study = make_study(failing(lambda settings, seed: settings.max_updates > 50 and seed == 100, kill))
Search(study, CONDITIONS, Path(sys.argv[1]), trials=2, seeds=2).work(Watcher())
"""
    assert python("-c", code, tmp_path / "s.db").returncode == -9
    with Search(make_study(), CONDITIONS, tmp_path / "s.db", trials=2, seeds=2) as search:
        assert search.progress().num_done == 6
        assert len(search.progress().running) == 1  # it is not known yet to be dead
    resumed, seen = searched(make_study(), tmp_path / "s.db")
    assert [condition for condition, _ in seen.begun] == [BEFORE, BEFORE]
    assert timeless(resumed) == timeless(whole[0])


def test_an_interrupted_run_is_made_again(whole: tuple[list[Outcome], Seen], tmp_path: Path) -> None:
    class Interrupting(Watcher):
        def updates(self, task: Task, fresh_examples: int, value: float | None) -> None:
            if task.trial == 1:
                raise KeyboardInterrupt

    with (
        Search(make_study(), CONDITIONS, tmp_path / "s.db", trials=2, seeds=2) as search,
        pytest.raises(KeyboardInterrupt),
    ):
        search.work(Interrupting())
    resumed, seen = searched(make_study(), tmp_path / "s.db")
    assert seen.begun[0] == (BASELINE, "trial 1")
    assert timeless(resumed) == timeless(whole[0])


def test_two_processes_share_the_runs_and_make_none_twice(
    whole: tuple[list[Outcome], Seen], tmp_path: Path
) -> None:
    """The second one comes while the first is in the middle of a run, and makes all that it can without it."""
    study, second, others = make_study(), Seen(), []

    class First(Seen):
        def begins(self, task: Task) -> None:
            super().begins(task)
            if not others:
                others.append(Search(study, CONDITIONS, tmp_path / "s.db", trials=2, seeds=2))
                for condition in CONDITIONS:
                    while others[0]._take(condition, second):
                        pass

    first = First()
    with Search(study, CONDITIONS, tmp_path / "s.db", trials=2, seeds=2) as search:
        search.work(first)
        shared = search.outcomes()
    others[0].close()
    assert second.begun[0] == (BASELINE, "trial 1")
    assert [condition for condition, _ in second.begun[1:]] == 4 * [BEFORE]
    assert [condition for condition, _ in first.begun] == 3 * [BASELINE]
    assert timeless(shared) == timeless(whole[0])


def test_a_crash_is_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    first = point(make_study(), 0)["lr"]
    study = make_study(failing(lambda settings, seed: settings.lr == first, divide))
    (outcome,), _ = searched(study, tmp_path / "s.db", [BASELINE], seeds=1)
    assert [run.status == "crashed" for run in outcome.trials] == [True, False]
    assert outcome.best == 1
    assert "ZeroDivisionError" in (outcome.trials[0].error or "")
    assert searched(study, tmp_path / "s.db", [BASELINE], seeds=1)[1].begun == []


def test_crashed_runs_are_made_again_where_that_is_asked_for(
    whole: tuple[list[Outcome], Seen], tmp_path: Path
) -> None:
    broken, runs = make_study(failing(lambda settings, seed: seed == 0, divide)), tmp_path / "runs.jsonl"
    (outcome,), _ = searched(broken, tmp_path / "s.db", [BEFORE], runs=runs)
    assert outcome.is_done
    assert (outcome.best, outcome.repeats) == (None, ())
    with Search(make_study(), [BEFORE], tmp_path / "s.db", trials=2, seeds=2, runs=runs) as search:
        search.retry_crashed()
        search.work(Watcher())
        made = search.outcomes()
    assert timeless(made) == timeless(whole[0][1:])
    # The file has both; what came later counts.
    elsewhere, seen = searched(make_study(), tmp_path / "other.db", [BEFORE], runs=runs)
    assert (elsewhere, seen.begun) == (made, [])


def test_repeats_that_ended_at_the_target_are_made_again_for_the_final_metric(
    whole: tuple[list[Outcome], Seen], tmp_path: Path
) -> None:
    storage, runs = tmp_path / "s.db", tmp_path / "runs.jsonl"
    short, _ = searched(make_study(), storage, runs=runs, to_budget=False)
    for outcome, other in zip(short, whole[0], strict=True):
        assert timeless([outcome])[0] == timeless([other])[0]
        for repeat, longer in zip(outcome.repeats, other.repeats, strict=True):
            assert (repeat.fresh_examples, repeat.final) == (longer.fresh_examples, None)
    assert searched(make_study(), storage, runs=runs, to_budget=False)[1].begun == []
    full, seen = searched(make_study(), storage, runs=runs)
    assert [key.partition(", ")[2] for _, key in seen.begun] == 2 * ["seed 100", "seed 101"]
    assert timeless(full) == timeless(whole[0])
    # They serve both kinds of search from now on, here and elsewhere.
    for options in ({}, {"to_budget": False}, {"to_budget": False, "storage": tmp_path / "other.db"}):
        again, seen = searched(make_study(), **{"storage": storage, "runs": runs, **options})
        assert (again, seen.begun) == (full, [])


def test_each_process_of_a_job_ends_its_repeats_where_the_job_says(tmp_path: Path) -> None:
    job = Job(tmp_path / "study.py", (BASELINE,), tmp_path / "s.db", trials=1, seeds=1, to_budget=False, runs=None)
    with job.search(make_study()) as search:
        search.work(Watcher())
        (repeat,) = search.outcomes()[0].repeats
    assert (repeat.status, repeat.final) == ("reached", None)


def test_a_repeat_that_failed_behind_the_target_is_not_made_again(tmp_path: Path) -> None:
    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[float]:
        for update, _ in enumerate(make_loader(loader_of(settings.batch_size), augment)):
            yield 1 / 0 if seed and update > 30 else update / 20

    (outcome,), _ = searched(make_study(train), tmp_path / "s.db", [BASELINE])
    assert all(repeat.status == "reached" and repeat.error for repeat in outcome.repeats)
    assert searched(make_study(train), tmp_path / "s.db", [BASELINE])[1].begun == []


def test_crashed_and_short_runs_are_both_made_again(whole: tuple[list[Outcome], Seen], tmp_path: Path) -> None:
    """A list of runs to make again does not undo the list before it."""
    storage = tmp_path / "s.db"
    broken = make_study(failing(lambda settings, seed: seed == 101, divide))
    searched(broken, storage, [BEFORE], to_budget=False)
    with Search(make_study(), [BEFORE], storage, trials=2, seeds=2, to_budget=False) as search:
        search.retry_crashed()
        search.work(Watcher())
    made, seen = searched(make_study(), storage, [BEFORE])
    assert len(seen.begun) == 2
    assert timeless(made) == timeless(whole[0][1:])


def test_a_search_echoes_in_the_workers_too(
    whole: tuple[list[Outcome], Seen], folder: Path, tmp_path: Path
) -> None:
    """In a storage that has other variants' runs, which stay."""
    storage = Path(shutil.copy(folder / "s.db", tmp_path))
    outcomes, seen = searched(make_study(), storage, [*CONDITIONS, WORKERS])
    assert outcomes[:2] == whole[0]
    assert {condition for condition, _ in seen.begun} == {WORKERS}
    assert outcomes[2].is_done
    assert all(run.status == "reached" and run.final is not None for run in outcomes[2].repeats)
    assert timeless(outcomes[2:]) == timeless(searched(make_study(), tmp_path / "other.db", [WORKERS])[0])


def test_a_training_without_a_data_loader_ends_a_study_of_the_workers(tmp_path: Path) -> None:
    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[float]:
        for _ in make_loader(list(loader_of(settings.batch_size)), augment):
            yield 1.0

    with pytest.raises(TrainError, match='variant "workers" got a list'):
        searched(make_study(train), tmp_path / "s.db", [WORKERS])


def test_a_training_function_that_cannot_count_ends_the_study_and_can_be_repaired(tmp_path: Path) -> None:
    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[Any]:
        for _ in make_loader(loader_of(), augment):
            yield "high"

    train.__qualname__ = "learn"  # so that the repaired one counts as the same study
    with pytest.raises(TrainError, match="train yielded 'high'"):
        searched(make_study(train), tmp_path / "s.db")
    assert all(outcome.is_done for outcome in searched(make_study(), tmp_path / "s.db")[0])


def test_another_machine_continues_from_the_file_of_runs(
    whole: tuple[list[Outcome], Seen], folder: Path, tmp_path: Path
) -> None:
    lines = (folder / "runs.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == len(whole[1].begun) == 8
    runs = tmp_path / "runs.jsonl"
    runs.write_text("".join(lines[:6]) + lines[6][:30])
    rest, seen = searched(make_study(), tmp_path / "s.db", runs=runs)
    assert len(seen.begun) == 2
    assert timeless(rest) == timeless(whole[0])
    assert rest[0] == whole[0][0]  # times too: those runs were not made again


def test_a_file_of_runs_that_begins_later_has_all(
    whole: tuple[list[Outcome], Seen], folder: Path, tmp_path: Path
) -> None:
    searched(make_study(), folder / "s.db", runs=tmp_path / "runs.jsonl")
    elsewhere, seen = searched(make_study(), tmp_path / "s.db", runs=tmp_path / "runs.jsonl")
    assert (elsewhere, seen.begun) == (whole[0], [])


def test_runs_with_other_settings_than_their_trial_has_are_refused(
    whole: tuple[list[Outcome], Seen], folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs.jsonl"
    runs.write_text((folder / "runs.jsonl").read_text().replace('"decay": 0.625', '"decay": 0.5'))
    with pytest.raises(ValueError, match=r"trial 0, has the settings .*0.5.*, expected .*0.625"):
        searched(make_study(), tmp_path / "s.db", runs=runs)


def test_a_storage_of_another_study_is_refused_and_stays_as_it_is(
    whole: tuple[list[Outcome], Seen], folder: Path
) -> None:
    storage = folder / "s.db"
    before = storage.read_bytes()
    with pytest.raises(ValueError, match=r"s.db belongs to another study: ") as caught:
        searched(make_study(target=2.0, lr=(0.1, 0.2)), storage)
    assert "target is 1.0 there and 2.0 here" in str(caught.value)
    assert "ranges is {'lr': [0.01, 0.4], 'decay': [0.25, 1.0]} there and" in str(caught.value)
    assert storage.read_bytes() == before


def test_a_file_whose_tables_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "begun.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}").engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        for name in tables:
            if name.startswith("trial") or name == "alembic_version":
                connection.execute(f"DROP TABLE {name}")
        connection.commit()
    assert searched(make_study(), path)


def test_files_of_something_else_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    text, tables, foreign = tmp_path / "text.db", tmp_path / "tables.db", tmp_path / "foreign.db"
    text.write_text("not a database" * 100)
    connection = sqlite3.connect(tables)
    connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()
    optuna.create_study(storage=f"sqlite:///{foreign}", study_name="theirs").add_trial(
        optuna.create_trial(value=1.0)
    )
    for path, says in (
        (text, "text.db is no SQLite file"),
        (tables, "tables.db is a database of something else, with the tables customers"),
        (foreign, "foreign.db holds an Optuna study 'theirs' that stretto study did not make"),
    ):
        before = path.read_bytes()
        with pytest.raises(ValueError, match=says):
            searched(make_study(), path)
        assert path.read_bytes() == before
    with pytest.raises(ValueError, match=r"there is no folder .*absent; make it first"):
        searched(make_study(), tmp_path / "absent" / "s.db")


def test_the_objective_puts_a_miss_beyond_the_budget_and_a_failure_beyond_a_miss() -> None:
    study = make_study(target=80.0, max_fresh_examples=1000)

    def of(status: str, best: float | None, fresh_examples: int = 1000) -> float:
        counts: dict[str, Any] = {"fresh_examples": fresh_examples, "updates": 10, "seconds": 1.0}
        return objective(study, Run(condition=BASELINE, params={}, seed=0, status=status, best=best, **counts))

    assert of("reached", 81.0, 400) == 400
    assert of("missed", 60.0) == 1200
    assert 1200 < of("missed", -500.0) < of("missed", -5000.0) < 2000
    assert of("diverged", 79.0) == of("crashed", None) == 3000


def test_the_time_left_is_estimated_from_the_runs_that_were_made(tmp_path: Path, monkeypatch: Any) -> None:
    with Search(make_study(), CONDITIONS, tmp_path / "s.db", trials=2, seeds=2) as search:
        assert search.progress().seconds_left is None
        monkeypatch.setattr(
            type(search._storage),
            "seconds",
            lambda self, condition, *, is_repeat: [] if is_repeat else [2.0, 4.0] if condition == BASELINE else [],
        )
        progress = search.progress()
    assert (progress.num_done, progress.num_wanted, progress.seconds_left) == (0, 8, 8 * 3.0)
