"""The runs of `study_store.py`: what decides one, how it is fed by a slow store, and the file where it is kept."""

import contextlib
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from workloads import resnet_fashion as workload

from stretto.demo.calibrate import DELAY_S, Speeds, set_ratio
from stretto.demo.conditions import NUM_WORKERS
from stretto.demo.fashion import load_fashion_mnist
from stretto.demo.link import Link
from stretto.demo.reader import ShardDataset, open_store
from stretto.demo.server import ObjectStore
from stretto.demo.shards import upload
from stretto.echo.factor import Factor
from stretto.study import Condition, MakeLoader, Run, Settings, Study, run
from stretto.study.conditions import TITLES, Variant
from stretto.study.points import point
from stretto.study.records import Record, check_same
from stretto.study.storage import objective
from stretto.study.study import Value

RATIO = 6.0
FACTORS = (2, 3, 4, 5, 6)
URL = "s3://fashion/train"
NEVER = 101.0  # percent
TIMED_BATCHES = 32  # fresh ones, for t_down
WARM_UP = 10


def echoed(factor: Factor, variant: Variant = "before") -> Condition:
    """The condition with the study's buffer and batch size."""
    return Condition(variant, factor, workload.study.buffer_batches, workload.study.batch_size)


BASELINE = Condition.baseline(workload.study.batch_size)
TIMED = echoed(4)  # its update is t_down
CONDITIONS = (
    BASELINE,
    *(echoed(factor) for factor in FACTORS),
    echoed("auto"),
    echoed(4, "after"),
    echoed(4, "batch"),
)


def title(condition: Condition) -> str:
    """Echo point and factor."""
    if condition.variant == "none":
        return TITLES["none"]
    factor = condition.factor if condition.factor == "auto" else f"e = {condition.factor:g}"
    return f"{TITLES[condition.variant]}, {factor}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What decides a run, and so what it is known by."""

    condition: Condition
    params: tuple[tuple[str, float], ...]
    seed: int

    @classmethod
    def of(cls, done: Run) -> "Wanted":
        return cls(done.condition, tuple(done.params.items()), done.seed)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A finished run, and what was measured before its seed's first."""

    speeds: Speeds
    run: Run


class Store:
    """A server with the training images in shards of one batch, behind a link that pauses for evaluations."""

    def __init__(self, link: Link, options: Mapping[str, Any]) -> None:
        self._link = link
        self._options = dict(options)

    def calibrate(self, study: Study, say: Callable[[str], None]) -> Speeds:
        """Find the rate at which R is 6. Raises RuntimeError if none gives that within 10 %."""
        t_down_s = measure_t_down(study)
        say(f"t_down = {1000 * t_down_s:.1f} ms an update of {study.batch_size}, {title(TIMED)}")
        dataset = self._dataset(study, 0)
        index = dataset.index()
        batch_bytes = index.num_bytes / index.num_examples * study.batch_size
        return set_ratio(self._link, dataset, t_down_s, RATIO, batch_bytes, say)

    def run(self, study: Study, wanted: Wanted, speeds: Speeds) -> Run:
        """Train once, at the rate that was found."""
        self._link.set_rate(speeds.rate_bytes_per_s)
        dataset = self._dataset(study, wanted.seed)
        dataset.index()  # not part of the training
        fresh: DataLoader[Any] = DataLoader(dataset, study.batch_size, num_workers=NUM_WORKERS, drop_last=True)
        try:
            return run(from_store(study, fresh, self._link), wanted.condition, dict(wanted.params), wanted.seed)
        finally:
            gc.collect()  # the end of the workers

    def _dataset(self, study: Study, seed: int) -> ShardDataset:
        return ShardDataset(URL, seed=seed, batch_size=study.batch_size, **self._options)


@contextlib.contextmanager
def open_slow_store() -> Iterator[Store]:
    """Start the server, upload the training images and put the link in front."""
    fashion = load_fashion_mnist()
    with ObjectStore() as server:
        keys: dict[str, Any] = {"access_key": server.access_key, "secret_key": server.secret_key}
        store = open_store(URL, endpoint=server.endpoint, **keys)
        size = workload.study.batch_size
        upload(store, fashion.train_images, fashion.train_labels, examples_per_shard=size)
        with Link(server.endpoint, delay_s=DELAY_S) as link:
            yield Store(link, {**keys, "endpoint": link.endpoint})


def from_store(study: Study, fresh: Any, link: Link) -> Study:
    """The same training on other fresh batches, the link paused during evaluations."""

    def paused(evaluate: Callable[[], float]) -> Callable[[], float]:
        def measure() -> float:
            link.pause()
            try:
                return evaluate()
            finally:
                link.resume()

        return measure

    def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[Value]:
        def make_from_store(_: Any, augment: Any = None) -> Iterator[Any]:
            return make_loader(fresh, augment)

        for value in study.train(settings, make_from_store, seed):
            yield paused(value) if callable(value) else value

    return replace(study, train=train)


def measure_t_down(study: Study) -> float:
    """Seconds of an update with echo, drawing and augmentation included, on data in memory: the median."""
    ends: list[float] = []
    short = replace(study, target=NEVER, max_fresh_examples=TIMED_BATCHES * study.batch_size)
    check(run(short, TIMED, point(study, 0), 0, on_update=lambda *_: ends.append(time.perf_counter())))
    return statistics.median(after - before for before, after in pairwise(ends[WARM_UP:]))


def check(made: Run) -> None:
    """Raise RuntimeError if the run crashed: nothing is to be kept of it."""
    if made.status == "crashed":
        raise RuntimeError(f"{title(made.condition)}, seed {made.seed} crashed:\n{made.error}")


def make_runs(
    study: Study,
    wanted: Sequence[Wanted],
    path: Path | None,
    open_store: Callable[[], contextlib.AbstractContextManager[Store]],
    say: Callable[[str], None],
) -> list[TimedRun]:
    """The wanted runs: those in the file, and those that were missing, now in it too if there is a file.

    No store is opened if nothing is missing. A seed that was begun goes on at its rate.
    """
    in_file = [] if path is None else read_runs(path, study.fingerprint)
    finished = {one: timed for timed in in_file if (one := Wanted.of(timed.run)) in wanted}
    speeds_of = {timed.run.seed: timed.speeds for timed in finished.values()}
    if missing := [one for one in wanted if one not in finished]:
        with open_store() as store:
            for one in missing:
                if one.seed not in speeds_of:
                    speeds_of[one.seed] = store.calibrate(study, say)
                done = store.run(study, one, speeds_of[one.seed])
                check(done)
                finished[one] = TimedRun(speeds_of[one.seed], done)
                if path is not None:
                    append_run(path, study.fingerprint, finished[one])
                say(
                    f"seed {done.seed}, {title(done.condition)}: {done.status} after {done.seconds:.1f} s, "
                    f"{done.updates:,} updates, {done.fresh_examples:,} fresh examples, {done.wait_s:.1f} s waited"
                )
    return [finished[one] for one in wanted]


def append_run(path: Path, fingerprint: Mapping[str, Any], timed: TimedRun) -> None:
    """Add a line to the file."""
    line = {"study": dict(fingerprint), "speeds": asdict(timed.speeds), "run": timed.run.to_plain()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_runs(path: Path, fingerprint: Mapping[str, Any]) -> list[TimedRun]:
    """The runs in a file; a last line that was cut off is removed from it.

    Raises ValueError if they are of another study.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    if (end := content.rfind(b"\n") + 1) < len(content):
        os.truncate(path, end)
    found = []
    for number, text in enumerate(content[:end].splitlines(), 1):
        line = json.loads(text)
        check_same(f"{path}, line {number}", line["study"], fingerprint)
        found.append(TimedRun(Speeds(**line["speeds"]), Run.from_plain(line["run"])))
    return found


def best_trial(study: Study, found: Sequence[Record], condition: Condition) -> Record | None:
    """The study's best trial of a condition, as its search chooses it."""
    trials = [r for r in found if r.task.condition == condition and not r.task.is_repeat]
    return min(trials, key=lambda r: (objective(study, r.run), r.task.trial), default=None)


def tuned(study: Study, found: Sequence[Record], condition: Condition) -> dict[str, float]:
    """The settings of the best trial of the condition in the study that is nearest by its factor.

    Of the same echo point, buffer and batch size; the middle of the ranges if there is none. "auto" counts as the
    factor R, and the study's own "auto" as none: its data lie in memory, so that hardly anything is used twice.
    """

    def distance(other: Condition) -> tuple[float, float]:
        return abs(math.log(number(other) / number(condition))), number(other)

    def number(of: Condition) -> float:
        return RATIO if of.factor == "auto" else of.factor

    def kind(of: Condition) -> tuple[Variant, int, int]:
        return of.variant, of.buffer_batches, of.batch_size

    tried = {r.task.condition for r in found if not r.task.is_repeat and r.task.condition.factor != "auto"}
    nearest = min((other for other in tried if kind(other) == kind(condition)), key=distance, default=None)
    best = None if nearest is None else best_trial(study, found, nearest)
    return point(study, 0) if best is None else dict(best.run.params)
