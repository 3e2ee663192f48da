"""The state of a study in an SQLite file, kept by Optuna: what is to be run, by whom it is run, and how it went.

An Optuna study for the trials of each condition and one for its repeats. A run that is wanted is enqueued there as
a waiting trial, which exactly one process takes; if that process dies, the trial fails and the run is enqueued
again. Processes may enqueue a run twice at the same moment: of its trials a complete one counts, else the first
that has not failed. Of several complete ones `records.best_of` says which counts.
"""

import contextlib
import math
import platform
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from stretto.study.conditions import Condition
from stretto.study.points import point
from stretto.study.records import Record, Task, best_of, check_same, is_preferred
from stretto.study.run import Run
from stretto.study.study import Study

if TYPE_CHECKING:
    import optuna

_HEARTBEAT_S = 30
_GRACE_S = 300  # of another machine's process; one of this machine is seen to be dead at once
_LOCK_S = 120  # a process waits so long for another one's write
_OPENINGS = 5
_TABLES = {
    *("alembic_version", "version_info", "studies", "study_directions", "trials", "trial_heartbeats"),
    *("study_system_attributes", "study_user_attributes", "trial_system_attributes", "trial_user_attributes"),
    *("trial_intermediate_values", "trial_params", "trial_values"),
}
"""Optuna's: a file that another process is making has some of them."""


def check_installed() -> None:
    """Raise RuntimeError if Optuna is missing."""
    if find_spec("optuna") is None:
        raise RuntimeError("a study needs optuna, which is missing: pip install 'stretto[study]'")


class Storage:
    """The trials of one study. Raises ValueError, before anything is written, for a file of something else."""

    def __init__(self, path: Path, study: Study, conditions: Iterable[Condition]) -> None:
        check_installed()
        import optuna  # noqa: PLC0415  (an optional dependency)

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._study = study
        self.path = path
        _check_file(path)
        self._backend = self._open()
        try:
            self._check_owner()
        except ValueError:
            self.close()
            raise
        self._studies: dict[tuple[str, bool], optuna.Study] = {}
        for condition in conditions:
            for is_repeat in (False, True):
                self._studies[condition.key, is_repeat] = self._create(condition, is_repeat)

    def close(self) -> None:
        """Close the file."""
        self._backend.remove_session()
        self._backend.engine.dispose()

    def finished(self, condition: Condition, *, is_repeat: bool) -> dict[str, Record]:
        """The runs that are done, by their task's key."""
        superseded = self._superseded(condition, is_repeat)
        made = self._made(condition, is_repeat).items()
        counting = best_of(record for number, record in made if number not in superseded)
        return {task.key: record for task, record in counting.items()}

    def seconds(self, condition: Condition, *, is_repeat: bool) -> list[float]:
        """How long each finished run took on the wall clock; none for those from a file of runs."""
        return [
            trial.duration.total_seconds()
            for trial in self._trials(condition, is_repeat)
            if trial.state == self._optuna.trial.TrialState.COMPLETE
            and trial.duration is not None
            and "owner" in trial.user_attrs
        ]

    def running(self, condition: Condition, *, is_repeat: bool) -> list[str]:
        """The keys of the tasks that processes have in hand."""
        state = self._optuna.trial.TrialState.RUNNING
        return [
            t.user_attrs["task"]
            for t in self._trials(condition, is_repeat)
            if t.state == state and "task" in t.user_attrs
        ]

    def num_killed(self, task: Task) -> int:
        """How many processes died while they made the run, since it was made the last time."""
        states, count = self._optuna.trial.TrialState, 0
        for trial in self._trials(task.condition, task.is_repeat):
            if trial.user_attrs.get("task") == task.key:
                if trial.state == states.COMPLETE:
                    count = 0
                elif trial.state == states.FAIL and trial.user_attrs.get("interrupted") is False:
                    count += 1
        return count

    def enter(self, record: Record) -> None:
        """Take over a run that was made elsewhere, unless there is or was one as good.

        Raises ValueError if its settings are not those of its trial.
        """
        task, expected = record.task, point(self._study, record.task.trial)
        if not _is_close(record.run.params, expected):
            raise ValueError(
                f"{task.condition.title}, {task.key}, has the settings {dict(record.run.params)}, expected "
                f"{expected}: it was made by another version of stretto"
            )
        # Or was: what is to be made again must not come back.
        made = self._made(task.condition, task.is_repeat).values()
        if not all(is_preferred(record.run, other.run) for other in made if other.task == task):
            return
        self._studies[task.condition.key, task.is_repeat].add_trial(
            self._optuna.trial.create_trial(
                params=expected,
                distributions=dict(self._distributions()),
                value=objective(self._study, record.run),
                user_attrs={**_attributes(task), "run": record.run.to_plain()},
            )
        )

    def take(self, tasks: Sequence[Task], execute: Callable[[Task], Run]) -> bool:
        """Make one of the tasks, which are of one condition and kind; False if all are done or in hand.

        What `execute` raises is passed on.
        """
        wanted = {task.key: task for task in tasks}
        condition, is_repeat = tasks[0].condition, tasks[0].is_repeat
        study, states = self._studies[condition.key, is_repeat], self._optuna.trial.TrialState
        self._release_dead(study)
        counting = self._counting(condition, is_repeat)
        for key, task in wanted.items():
            if key not in counting:
                study.enqueue_trial(point(self._study, task.trial), user_attrs=_attributes(task))
        if all(key in counting and counting[key].state != states.WAITING for key in wanted):
            return False

        taken: int | None = None
        failure: BaseException | None = None

        def objective_of(trial: "optuna.Trial") -> float:
            nonlocal taken, failure
            taken = trial.number
            # Optuna gives the first that waits, wanted or not, and where none does, as another process was quicker,
            # one that it makes, without a task.
            key = trial.user_attrs.get("task", "")
            first = self._counting(condition, is_repeat).get(key)
            if key not in wanted or first is None or first.number != trial.number:
                raise self._optuna.TrialPruned
            trial.set_user_attr("owner", _this_process())
            trial.set_user_attr("interrupted", False)
            for name, distribution in self._distributions().items():
                trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
            try:
                run = execute(wanted[key])
            except BaseException as error:
                failure = error
                trial.set_user_attr("interrupted", True)
                raise
            trial.set_user_attr("run", run.to_plain())
            return objective(self._study, run)

        try:
            study.optimize(objective_of, n_trials=1)
        except (ValueError, RuntimeError):
            if failure is not None:
                raise failure from None
            # A machine that slept: another process took this one for dead, and the run is being made again.
            if taken is None or study.get_trials(deepcopy=False)[taken].state != states.FAIL:
                raise
        return True

    def supersede(self, condition: Condition, is_repeat: bool, is_outdated: Callable[[Run], bool]) -> None:
        """Let the runs of which `is_outdated` is true be made again."""
        before = self._superseded(condition, is_repeat)
        made = self._made(condition, is_repeat).items()
        outdated = [number for number, record in made if is_outdated(record.run)]
        if not set(outdated) <= set(before):
            superseded = sorted({*before, *outdated})
            self._studies[condition.key, is_repeat].set_user_attr("superseded", superseded)

    def _open(self) -> "optuna.storages.RDBStorage":
        for opening in range(1, _OPENINGS + 1):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
                    return self._optuna.storages.RDBStorage(
                        f"sqlite:///{self.path.resolve()}",
                        engine_kwargs={"connect_args": {"timeout": _LOCK_S}},
                        heartbeat_interval=_HEARTBEAT_S,
                        grace_period=_GRACE_S,
                    )
            except Exception as error:  # of SQLAlchemy's many: another process may be making the tables
                if opening == _OPENINGS:
                    raise ValueError(f"{self.path} cannot be used as a storage: {error}") from error
                time.sleep(0.1 * opening)
        raise AssertionError

    def _check_owner(self) -> None:
        """Raise ValueError if the file has Optuna studies that are not of this study."""
        for found in self._optuna.get_all_study_summaries(self._backend):
            fingerprint = found.user_attrs.get("stretto_study")
            if fingerprint is not None:
                check_same(str(self.path), fingerprint, self._study.fingerprint)
            elif found.n_trials:
                raise ValueError(
                    f"{self.path} holds an Optuna study {found.study_name!r} that stretto study did not make: "
                    "choose another place with --storage"
                )

    def _create(self, condition: Condition, is_repeat: bool) -> "optuna.Study":
        study = self._optuna.create_study(
            storage=self._backend,
            sampler=self._optuna.samplers.RandomSampler(seed=0),
            study_name=f"{condition.key} seeds" if is_repeat else condition.key,
            load_if_exists=True,
        )
        if "stretto_study" not in study.user_attrs:
            study.set_user_attr("stretto_study", self._study.fingerprint)
        return study

    def _trials(self, condition: Condition, is_repeat: bool) -> "list[optuna.trial.FrozenTrial]":
        return self._studies[condition.key, is_repeat].get_trials(deepcopy=False)

    def _made(self, condition: Condition, is_repeat: bool) -> dict[int, Record]:
        """All runs, those too that are to be made again, by their trial's number."""
        found = {}
        for trial in self._trials(condition, is_repeat):
            if trial.state == self._optuna.trial.TrialState.COMPLETE:
                run = Run.from_plain(trial.user_attrs["run"])
                found[trial.number] = Record(Task(condition, trial.user_attrs["trial"], run.seed, is_repeat), run)
        return found

    def _superseded(self, condition: Condition, is_repeat: bool) -> list[int]:
        found: list[int] = self._studies[condition.key, is_repeat].user_attrs.get("superseded", [])
        return found

    def _counting(self, condition: Condition, is_repeat: bool) -> "dict[str, optuna.trial.FrozenTrial]":
        """The trial that counts of each task that has one, by the task's key."""
        states = self._optuna.trial.TrialState
        superseded = self._superseded(condition, is_repeat)
        found: dict[str, optuna.trial.FrozenTrial] = {}
        for trial in self._trials(condition, is_repeat):
            key = trial.user_attrs.get("task")
            if key is None or trial.number in superseded:
                continue
            if trial.state == states.COMPLETE or (
                trial.state in (states.WAITING, states.RUNNING) and key not in found
            ):
                found[key] = trial
        return found

    def _distributions(self) -> "dict[str, optuna.distributions.FloatDistribution]":
        make = self._optuna.distributions.FloatDistribution
        ranges = self._study.ranges.items()
        return {name: make(low, high, log=self._study.is_log(name)) for name, (low, high) in ranges}

    def _release_dead(self, study: "optuna.Study") -> None:
        """Fail the trials of processes that are no more; those of other machines only after the time of grace."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._optuna.storages.fail_stale_trials(study)
        states = self._optuna.trial.TrialState
        for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if _is_dead(trial):
                try:
                    study.tell(trial.number, state=states.FAIL)
                except (ValueError, RuntimeError):  # another process was quicker
                    continue


def objective(study: Study, run: Run) -> float:
    """What the search makes small: fresh examples to the target, beyond the budget where it was not reached."""
    if run.status == "reached":
        return float(run.fresh_examples)
    if run.status == "missed" and run.best is not None:
        distance = abs(run.best - study.target) / max(abs(study.target), 1e-12)
        return study.max_fresh_examples * (1 + distance / (1 + distance))
    return 3.0 * study.max_fresh_examples


def _attributes(task: Task) -> dict[str, Any]:
    return {"task": task.key, "trial": task.trial, "seed": task.seed}


def _this_process() -> dict[str, Any]:
    process = psutil.Process()
    return {"host": platform.node(), "pid": process.pid, "created": process.create_time()}


def _is_dead(trial: "optuna.trial.FrozenTrial") -> bool:
    """Whether the process that has it in hand is known to have ended."""
    owner = trial.user_attrs.get("owner")
    if owner is None:  # a process says so as soon as it has taken a trial
        began = trial.datetime_start
        return began is not None and (datetime.now() - began).total_seconds() > _GRACE_S
    if owner["host"] != platform.node():
        return False
    try:
        process = psutil.Process(owner["pid"])
        is_another = abs(process.create_time() - owner["created"]) > 1
        return bool(is_another or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _is_close(params: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    """Whether they are the same but for what another machine's mathematics rounds otherwise."""
    return params.keys() == expected.keys() and all(
        math.isclose(params[name], value, rel_tol=1e-9) for name, value in expected.items()
    )


def _check_file(path: Path) -> None:
    """Raise ValueError if the file is there and no database of Optuna's."""
    if not path.exists():
        if not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.resolve().parent}; make it first")
        return
    try:
        connecting = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_LOCK_S)
        with contextlib.closing(connecting) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is no SQLite file ({error}): choose another place with --storage") from None
    if not (tables <= _TABLES or {"studies", "trials"} <= tables):
        raise ValueError(
            f"{path} is a database of something else, with the tables {', '.join(sorted(tables)[:5])}: choose "
            "another place with --storage"
        )
