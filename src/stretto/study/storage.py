"""The state of a study in an SQLite file, kept by Optuna: what is to be run, by whom it is run, and how it went.

An Optuna study for the trials of each condition and one for its repeats. A run that is wanted is enqueued there as
a waiting trial, which exactly one process takes; if that process dies, the trial fails and the run is enqueued
again. Processes may enqueue a run twice at the same moment: of its trials the first that has not failed is the one
that counts.
"""

import contextlib
import platform
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from stretto.study.conditions import Condition
from stretto.study.points import point
from stretto.study.records import Record, Task, check_same
from stretto.study.run import Run
from stretto.study.study import Study, TrainError

if TYPE_CHECKING:
    import optuna

_HEARTBEAT_S = 30
_GRACE_S = 300  # of another machine's process; one of this machine is seen to be dead at once
_LOCK_S = 120  # a process waits so long for another one's write
_OPENINGS = 5


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
        found: dict[str, Record] = {}
        superseded = self._superseded(condition, is_repeat)
        for trial in self._trials(condition, is_repeat):
            if trial.state == self._optuna.trial.TrialState.COMPLETE and trial.number not in superseded:
                run = Run.from_plain(trial.user_attrs["run"])
                task = Task(condition, trial.user_attrs["trial"], run.seed, is_repeat)
                found.setdefault(task.key, Record(task, run))
        return found

    def seconds(self, condition: Condition, *, is_repeat: bool) -> list[float]:
        """How long each finished run took on the wall clock; none for those from a file of runs."""
        return [
            trial.duration.total_seconds()
            for trial in self._trials(condition, is_repeat)
            if trial.duration is not None and "owner" in trial.user_attrs
        ]

    def running(self, condition: Condition, *, is_repeat: bool) -> list[str]:
        """The keys of the tasks that processes have in hand."""
        state = self._optuna.trial.TrialState.RUNNING
        return [
            t.user_attrs["task"]
            for t in self._trials(condition, is_repeat)
            if t.state == state and "task" in t.user_attrs
        ]

    def want(self, tasks: Iterable[Task]) -> None:
        """Enqueue those that are neither done nor in hand nor waiting."""
        for task in tasks:
            study = self._studies[task.condition.key, task.is_repeat]
            superseded = self._superseded(task.condition, task.is_repeat)
            if self._first(study, task.key, superseded) is None:
                study.enqueue_trial(point(self._study, task.trial), user_attrs=_attributes(task))

    def enter(self, record: Record) -> None:
        """Take over a run that was made elsewhere, unless there is one.

        Raises ValueError if its settings are not those of its trial.
        """
        task, expected = record.task, point(self._study, record.task.trial)
        if dict(record.run.params) != expected:
            raise ValueError(
                f"{task.condition.title}, {task.key}, has the settings {dict(record.run.params)}, expected "
                f"{expected}: it was made by another version of stretto"
            )
        # Nor where it crashed and is to be made again.
        if any(
            trial.user_attrs.get("task") == task.key and "run" in trial.user_attrs
            for trial in self._trials(task.condition, task.is_repeat)
        ):
            return
        self._studies[task.condition.key, task.is_repeat].add_trial(
            self._optuna.trial.create_trial(
                params=expected,
                distributions=dict(self._distributions()),
                value=objective(self._study, record.run),
                user_attrs={**_attributes(task), "run": record.run.to_plain()},
            )
        )

    def take(self, condition: Condition, is_repeat: bool, execute: Callable[[Task], Run]) -> bool:
        """Make one of the waiting runs; False if there is none. What `execute` raises is passed on."""
        study, states = self._studies[condition.key, is_repeat], self._optuna.trial.TrialState
        self._release_dead(study)
        if not study.get_trials(deepcopy=False, states=(states.WAITING,)):
            return False

        taken: int | None = None

        def objective_of(trial: "optuna.Trial") -> float:
            nonlocal taken
            key = trial.user_attrs.get("task")
            # Without a task it is one that Optuna made, as another process was quicker to take the last.
            first = None if key is None else self._first(study, key, self._superseded(condition, is_repeat))
            if first != trial.number:
                raise self._optuna.TrialPruned
            taken = trial.number
            trial.set_user_attr("owner", _this_process())
            for name, distribution in self._distributions().items():
                trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
            task = Task(condition, trial.user_attrs["trial"], trial.user_attrs["seed"], is_repeat)
            run = execute(task)
            trial.set_user_attr("run", run.to_plain())
            return objective(self._study, run)

        try:
            study.optimize(objective_of, n_trials=1)
        except TrainError:
            raise
        except (ValueError, RuntimeError):
            # A machine that slept: another process took this one for dead, and the run is being made again.
            if taken is None or study.get_trials(deepcopy=False)[taken].state != states.FAIL:
                raise
        return True

    def supersede(self, condition: Condition, is_repeat: bool, is_outdated: Callable[[Run], bool]) -> None:
        """Let the runs of which `is_outdated` is true be made again."""
        before = self._superseded(condition, is_repeat)
        outdated = [
            trial.number
            for trial in self._trials(condition, is_repeat)
            if "run" in trial.user_attrs and is_outdated(Run.from_plain(trial.user_attrs["run"]))
        ]
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

    def _superseded(self, condition: Condition, is_repeat: bool) -> list[int]:
        found: list[int] = self._studies[condition.key, is_repeat].user_attrs.get("superseded", [])
        return found

    def _first(self, study: "optuna.Study", key: str, superseded: list[int]) -> int | None:
        """The number of the task's trial that counts, if there is one."""
        states = self._optuna.trial.TrialState
        return next(
            (
                trial.number
                for trial in study.get_trials(deepcopy=False)
                if trial.user_attrs.get("task") == key
                and trial.state in (states.WAITING, states.RUNNING, states.COMPLETE)
                and trial.number not in superseded
            ),
            None,
        )

    def _distributions(self) -> "dict[str, optuna.distributions.FloatDistribution]":
        make = self._optuna.distributions.FloatDistribution
        ranges = self._study.ranges.items()
        return {name: make(low, high, log=self._study.is_log(name)) for name, (low, high) in ranges}

    def _release_dead(self, study: "optuna.Study") -> None:
        """Fail the trials of this machine's processes that are no more; Optuna does so for others after a while."""
        states = self._optuna.trial.TrialState
        for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if _is_dead(trial.user_attrs.get("owner")):
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


def _is_dead(owner: Any) -> bool:
    """Whether it was a process of this machine that has ended."""
    if owner is None or owner["host"] != platform.node():
        return False
    try:
        process = psutil.Process(owner["pid"])
        is_another = abs(process.create_time() - owner["created"]) > 1
        return bool(is_another or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


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
    if tables and not {"studies", "trials"} <= tables:
        raise ValueError(
            f"{path} is a database of something else, with the tables {', '.join(sorted(tables)[:5])}: choose "
            "another place with --storage"
        )
