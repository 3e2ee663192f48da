"""Which trial is made, and by whom: processes that die, runs that are not wanted any more."""

import json
import sqlite3
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest

from stretto.study import Search, Watcher
from stretto.study.records import Task, append, read
from tests.forked import python
from tests.study.toys import BASELINE, Seen, make_study, searched

REPEAT = "trial 0, seed 100"
BEFORE_GRACE_S, AFTER_GRACE_S = 200, 301


class Leaving(Watcher):
    """Leaves a run in hand, as a process that is killed does: Optuna does not catch SystemExit."""

    def begins(self, task: Task) -> None:
        raise SystemExit


class Interrupting(Watcher):
    """Ctrl-C in the run with this key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def begins(self, task: Task) -> None:
        if task.key == self._key:
            raise KeyboardInterrupt


def opened(storage: Path, trials: int = 1, seeds: int = 1, **options: Any) -> Search:
    return Search(make_study(), [BASELINE], storage, trials=trials, seeds=seeds, **options)


def leave(storage: Path) -> None:
    """Begin a run and leave it in hand."""
    with opened(storage) as search, pytest.raises(SystemExit):
        search.work(Leaving())


def change(storage: Path, *statements: str) -> None:
    with closing(sqlite3.connect(storage)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def set_owner(storage: Path, **changes: Any) -> None:
    """Of the run that was left in hand, which is this process's."""
    with closing(sqlite3.connect(storage)) as connection, connection:
        ((owner,),) = connection.execute("SELECT value_json FROM trial_user_attributes WHERE key = 'owner'")
        changed = json.dumps({**json.loads(owner), **changes})
        connection.execute("UPDATE trial_user_attributes SET value_json = ? WHERE key = 'owner'", (changed,))


def takes_none(storage: Path) -> bool:
    with opened(storage) as search:
        return not search.take(Watcher())


def begun(storage: Path, **options: Any) -> list[str]:
    """What is made until all is."""
    options = {"trials": 1, "seeds": 1, **options}
    return [key for _, key in searched(make_study(), storage, [BASELINE], **options)[1].begun]


def test_a_run_of_another_machines_dead_process_is_made_again_after_the_time_of_grace(tmp_path: Path) -> None:
    leave(storage := tmp_path / "s.db")
    set_owner(storage, host="elsewhere")
    for age_s, is_alive in ((BEFORE_GRACE_S, True), (AFTER_GRACE_S, False)):
        change(storage, f"UPDATE trial_heartbeats SET heartbeat = datetime('now', '-{age_s} seconds')")
        if is_alive:
            assert takes_none(storage)
    assert begun(storage) == ["trial 0", REPEAT]


def test_a_run_whose_process_died_before_it_signed_is_made_again_after_the_time_of_grace(tmp_path: Path) -> None:
    leave(storage := tmp_path / "s.db")
    change(
        storage,
        "DELETE FROM trial_heartbeats",
        "DELETE FROM trial_user_attributes WHERE key IN ('owner', 'interrupted')",
    )
    for age_s, is_alive in ((BEFORE_GRACE_S, True), (AFTER_GRACE_S, False)):
        change(storage, f"UPDATE trials SET datetime_start = '{datetime.now() - timedelta(seconds=age_s)}'")
        if is_alive:
            assert takes_none(storage)
    assert begun(storage) == ["trial 0", REPEAT]


def test_only_runs_that_are_complete_tell_how_long_one_takes(tmp_path: Path) -> None:
    leave(storage := tmp_path / "s.db")
    change(storage, f"UPDATE trials SET datetime_start = '{datetime.now() - timedelta(days=1)}'")
    set_owner(storage, created=0.0)  # another process had this one's number
    with opened(storage) as search:
        search.work(Watcher())
        seconds = search._storage.seconds(BASELINE, is_repeat=False)
    made = optuna.load_study(study_name=BASELINE.key, storage=f"sqlite:///{storage}").trials
    assert [trial.state.name for trial in made] == ["FAIL", "COMPLETE"]
    assert made[1].duration is not None
    assert seconds == [made[1].duration.total_seconds()]


def test_a_run_that_waits_is_not_made_where_the_file_of_runs_has_it_by_now(tmp_path: Path) -> None:
    study, runs = make_study(), tmp_path / "runs.jsonl"
    searched(study, tmp_path / "other.db", [BASELINE], runs=tmp_path / "all.jsonl")
    with opened(tmp_path / "s.db", trials=2) as search, pytest.raises(KeyboardInterrupt):
        search.work(Interrupting("trial 0"))
    for record in read(tmp_path / "all.jsonl", study.fingerprint):
        if record.task.key == "trial 1":
            append(runs, study.fingerprint, record)
    (outcome,), seen = searched(study, tmp_path / "s.db", [BASELINE], trials=2, seeds=1, runs=runs)
    assert [key for _, key in seen.begun] == ["trial 0", f"trial {outcome.best}, seed 100"]


def test_a_run_that_killed_three_processes_counts_as_crashed_and_the_study_goes_on(tmp_path: Path) -> None:
    storage, runs = tmp_path / "s.db", tmp_path / "runs.jsonl"
    code = """
import os, signal, sys
from pathlib import Path
from stretto.study import Search, Watcher
from stretto.study.points import point
from tests.study.toys import BASELINE, failing, make_study
first, kill = point(make_study(), 0)["lr"], lambda: os.kill(os.getpid(), signal.SIGKILL)
study = make_study(failing(lambda settings, seed: settings.lr == first, kill))
Search(study, [BASELINE], Path(sys.argv[1]), trials=2, seeds=1).work(Watcher())
"""
    for _ in range(3):
        assert python("-c", code, storage).returncode == -9
    assert begun(storage, trials=2, runs=runs) == ["trial 0", "trial 1, seed 100"]
    with opened(storage, trials=2, runs=runs) as search:
        (outcome,) = search.outcomes()
        assert outcome.best == 1
        assert outcome.trials[0].status == "crashed"
        assert outcome.trials[0].error == "3 processes that made this run were killed, often for their memory"
        assert outcome.trials[0] in [record.run for record in read(runs, search.study.fingerprint)]
        search.retry_crashed()
        search.work(Watcher())
        assert search.outcomes()[0].trials[0].status == "reached"


def test_an_interrupted_run_is_made_again_however_often(tmp_path: Path) -> None:
    for _ in range(4):
        with opened(tmp_path / "s.db") as search, pytest.raises(KeyboardInterrupt):
            search.work(Interrupting("trial 0"))
    (outcome,), _ = searched(make_study(), tmp_path / "s.db", [BASELINE], trials=1, seeds=1)
    assert outcome.trials[0].status == "reached"


def test_an_interruption_is_passed_on_where_the_run_was_taken_for_dead(tmp_path: Path) -> None:
    class Late(Watcher):
        def begins(self, task: Task) -> None:
            study = optuna.load_study(study_name=BASELINE.key, storage=f"sqlite:///{tmp_path / 's.db'}")
            study.tell(0, state=optuna.trial.TrialState.FAIL)
            raise KeyboardInterrupt

    with opened(tmp_path / "s.db") as search, pytest.raises(KeyboardInterrupt):
        search.work(Late())
    assert begun(tmp_path / "s.db") == ["trial 0", REPEAT]


def test_repeats_of_a_trial_that_is_no_longer_the_best_are_not_made(tmp_path: Path) -> None:
    with opened(tmp_path / "s.db", seeds=3) as search, pytest.raises(KeyboardInterrupt):
        search.work(Interrupting(REPEAT))
    seen = Seen()
    with opened(tmp_path / "s.db", trials=3, seeds=2) as search:
        search.work(seen)
        best = search.outcomes()[0].best
    assert best != 0
    assert [key for _, key in seen.begun] == [
        *("trial 1", "trial 2"),
        *(f"trial {best}, seed {seed}" for seed in (100, 101)),
    ]


def test_of_fewer_seeds_the_others_are_not_made_before_the_study_is_done(tmp_path: Path) -> None:
    with opened(tmp_path / "s.db", seeds=3) as search, pytest.raises(KeyboardInterrupt):
        search.work(Interrupting(REPEAT))
    # Seeds 101 and 102 wait in front of 100, which is enqueued again.
    assert begun(tmp_path / "s.db") == [REPEAT]
    assert begun(tmp_path / "s.db", seeds=3) == ["trial 0, seed 101", "trial 0, seed 102"]
