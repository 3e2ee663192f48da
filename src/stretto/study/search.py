"""The protocol: the same trials in every condition, then each condition's best trial with fresh seeds."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.study import records
from stretto.study.conditions import Condition, check_batches
from stretto.study.points import point
from stretto.study.records import Record, Task
from stretto.study.run import Run, run
from stretto.study.storage import Storage, objective
from stretto.study.study import Study, check_count

SEARCH_SEED = 0
FIRST_REPEAT_SEED = 100
_POLL_S = 0.5  # between looks at what other processes have in hand
_MAX_KILLED = 3  # processes that die of a run before it counts as crashed


@dataclass(frozen=True, slots=True)
class Outcome:
    """The runs of one condition, as far as they are made."""

    condition: Condition
    trials: tuple[Run, ...]
    """By their number."""
    best: int | None
    """The number of the best trial, once all are made; None too where none is worth a repeat."""
    repeats: tuple[Run, ...]
    """The best trial with fresh seeds."""
    is_done: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a study is."""

    num_done: int
    num_wanted: int
    seconds_left: float | None
    """Of one process's time; None before the first run is done."""
    running: tuple[str, ...]
    """What is in hand: condition and task."""


class Watcher:
    """Told what happens in this process."""

    def begins(self, task: Task) -> None:
        """A run begins."""

    def updates(self, task: Task, fresh_examples: int, value: float | None) -> None:
        """An update was made; the latest metric value."""

    def ends(self, task: Task, run: Run) -> None:
        """A run is over, and counts in `Search.progress`."""


class Search:
    """A study's runs, made by as many processes as there are with the same storage.

    Args:
        study: what is trained.
        conditions: to compare, see `plan`.
        storage: the SQLite file of its state, made if it is not there.
        trials: points of the search space for each condition.
        seeds: repeats of each condition's best.
        to_budget: let repeats go on behind the target to the study's fixed budget, for the final metric. Those that
            the storage has from a search without it are made again.
        runs: a file that gets a line for each run. Runs that it has already are not made again; of several of a
            task `records.best_of` says which counts.

    Raises ValueError if one of the files belongs to something else, or a batch is larger than the study's budget.
    """

    def __init__(
        self,
        study: Study,
        conditions: Sequence[Condition],
        storage: Path,
        *,
        trials: int = 3,
        seeds: int = 3,
        to_budget: bool = True,
        runs: Path | None = None,
    ) -> None:
        check_count("trials", trials)
        check_count("seeds", seeds)
        self.study = study
        self.conditions = tuple(conditions)
        check_batches(study, self.conditions)
        self._num_trials = trials
        self._num_seeds = seeds
        self._to_budget = to_budget
        self._runs = runs
        written = [] if runs is None else records.read(runs, study.fingerprint)
        self._storage = Storage(storage, study, self.conditions)
        self._done: dict[Condition, Outcome] = {}
        if runs is not None:
            try:
                self._exchange(runs, written)
            except ValueError:
                self.close()
                raise
        if to_budget:
            for condition in self.conditions:
                self._storage.supersede(condition, True, _stopped_before_budget)

    def __enter__(self) -> "Search":
        """Close the storage at the end of the block."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the storage."""
        self._storage.close()

    def work(self, watcher: Watcher) -> None:
        """Make runs until all are made, by this process or by others. An interrupted run is left to be made again.

        So is one whose process is killed, three times; then it counts as crashed. Raises TrainError.
        """
        while not self.is_done:
            if not self.take(watcher):
                time.sleep(_POLL_S)

    @property
    def is_done(self) -> bool:
        """Whether all runs are made."""
        return all(self.outcome(condition).is_done for condition in self.conditions)

    def take(self, watcher: Watcher) -> bool:
        """Make one run, of the first condition that has one to begin; False if none has now. Raises TrainError."""
        return any(
            self._take(condition, watcher) for condition in self.conditions if not self.outcome(condition).is_done
        )

    def retry_crashed(self) -> None:
        """Make the runs that crashed again."""
        self._done.clear()
        for condition in self.conditions:
            for is_repeat in (False, True):
                self._storage.supersede(condition, is_repeat, lambda made: made.status == "crashed")

    def outcome(self, condition: Condition) -> Outcome:
        """What there is of a condition."""
        if condition in self._done:
            return self._done[condition]
        found = outcome_of(
            self.study,
            condition,
            self._storage.finished(condition, is_repeat=False),
            self._storage.finished(condition, is_repeat=True),
            trials=self._num_trials,
            seeds=self._num_seeds,
        )
        if found.is_done:
            self._done[condition] = found
        return found

    def outcomes(self) -> list[Outcome]:
        """Of all conditions."""
        return [self.outcome(condition) for condition in self.conditions]

    def progress(self) -> Progress:
        """How far it is, all processes together."""
        num_done, left = 0, [0, 0]
        spent: list[list[float]] = [[], []]
        running: list[str] = []
        for outcome in self.outcomes():
            condition = outcome.condition
            wanted = (self._num_trials, self._num_seeds)
            made = wanted if outcome.is_done else (len(outcome.trials), len(outcome.repeats))
            num_done += sum(made)
            for kind in (False, True):
                left[kind] += wanted[kind] - made[kind]
                spent[kind] += self._storage.seconds(condition, is_repeat=kind)
                if not outcome.is_done:
                    running += [
                        f"{condition.title}: {key}" for key in self._storage.running(condition, is_repeat=kind)
                    ]
        return Progress(
            num_done=num_done,
            num_wanted=len(self.conditions) * (self._num_trials + self._num_seeds),
            seconds_left=_seconds_left(left, spent),
            running=tuple(running),
        )

    def _take(self, condition: Condition, watcher: Watcher) -> bool:
        best = self.outcome(condition).best
        wanted = (
            _trials(condition, self._num_trials) if best is None else _repeats(condition, best, self._num_seeds)
        )
        finished: list[tuple[Task, Run]] = []

        def execute(task: Task) -> Run:
            finished.append((task, self._execute(task, watcher)))
            return finished[-1][1]

        is_taken = self._storage.take(wanted, execute)
        for task, made in finished:
            watcher.ends(task, made)
        return is_taken

    def _execute(self, task: Task, watcher: Watcher) -> Run:
        watcher.begins(task)
        params = point(self.study, task.trial)
        if self._storage.num_killed(task) < _MAX_KILLED:
            done = run(
                self.study,
                task.condition,
                params,
                task.seed,
                to_budget=task.is_repeat and self._to_budget,
                on_update=lambda fresh_examples, value: watcher.updates(task, fresh_examples, value),
            )
        else:
            done = _killed(task, params)
        if self._runs is not None:
            records.append(self._runs, self.study.fingerprint, Record(task, done))
        return done

    def _exchange(self, path: Path, written: list[Record]) -> None:
        """Enter the runs of the file into the storage, and the other way round, where there is none as good."""
        for record in records.best_of(written).values():
            if record.task.condition in self.conditions:
                self._storage.enter(record)
        made = [
            record
            for condition in self.conditions
            for is_repeat in (False, True)
            for record in self._storage.finished(condition, is_repeat=is_repeat).values()
        ]
        # Read again, and last: another process writes a run's line before it is finished in the storage.
        known = records.best_of(records.read(path, self.study.fingerprint))
        for record in made:
            before = known.get(record.task)
            if before is None or records.is_preferred(record.run, before.run):
                records.append(path, self.study.fingerprint, record)


def outcome_of(
    study: Study,
    condition: Condition,
    finished_trials: Mapping[str, Record],
    finished_repeats: Mapping[str, Record],
    *,
    trials: int,
    seeds: int,
) -> Outcome:
    """What finished runs, by their task's key, come to where so many trials and seeds are wanted."""
    made = _made(finished_trials, _trials(condition, trials))
    best = _best(study, made) if len(made) == trials else None
    repeats = [] if best is None else _made(finished_repeats, _repeats(condition, best, seeds))
    is_done = len(made) == trials and (best is None or len(repeats) == seeds)
    return Outcome(condition, tuple(made), best, tuple(repeats), is_done)


def _trials(condition: Condition, count: int) -> list[Task]:
    return [Task(condition, number, SEARCH_SEED) for number in range(count)]


def _repeats(condition: Condition, best: int, count: int) -> list[Task]:
    seeds = range(FIRST_REPEAT_SEED, FIRST_REPEAT_SEED + count)
    return [Task(condition, best, seed, is_repeat=True) for seed in seeds]


def _made(finished: Mapping[str, Record], tasks: list[Task]) -> list[Run]:
    return [finished[task.key].run for task in tasks if task.key in finished]


def _best(study: Study, trials: list[Run]) -> int | None:
    """The first of the best, unless it ended before its time as all others did."""
    values = [objective(study, made) for made in trials]
    best = values.index(min(values))
    return best if trials[best].status in ("reached", "missed") else None


def _killed(task: Task, params: Mapping[str, float]) -> Run:
    """A run that no process lived to finish."""
    return Run(
        condition=task.condition,
        params=params,
        seed=task.seed,
        status="crashed",
        fresh_examples=0,
        updates=0,
        seconds=0.0,
        best=None,
        error=f"{_MAX_KILLED} processes that made this run were killed, often for their memory",
    )


def _stopped_before_budget(repeat: Run) -> bool:
    """Whether a repeat lacks the final metric for no other reason than that its search did without."""
    return repeat.final is None and repeat.error is None


def _seconds_left(left: list[int], spent: list[list[float]]) -> float | None:
    """Runs of each kind that are left, at the mean time of that kind, or of both where none is made yet."""
    every = [*spent[0], *spent[1]]
    if not every:
        return None
    return sum(
        count * sum(of_kind or every) / len(of_kind or every) for count, of_kind in zip(left, spent, strict=True)
    )
