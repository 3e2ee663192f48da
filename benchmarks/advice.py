"""Whether advice gives what it promises: every piece that has a prediction, on five starved jobs (starved.py).

Each job runs as a script under `stretto run`. What its record advises is then done for real: arguments of the
DataLoader, a cache of what a stage returns, EchoDataLoader and `stretto.echo` at every insertion point that is
advised, with its factor and buffer. Updates a second are counted in the steady state, with the buffer full, over
whole shards, in three windows one after the other: the spread is theirs.
Only `persistent_workers`, whose prediction is about epochs with their starts, is measured over such epochs. The job
as it is takes its turns too: how far it is from its profile is the machine's drift.
"""

import gc
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import starved
import torch
from harness import Report, Spread, parse_arguments, write_table
from starved import JOBS, Job, Trainer, epochs
from torch.utils.data import DataLoader, Dataset

import stretto
from stretto.launch.options import RunOptions
from stretto.launch.parent import run_script
from stretto.profile.schema import AdviceRecord, RunRecord

_ENDLESS = 1 << 16  # batches
_FULL = 0.93  # of what a buffer holds in the steady state
_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long things take."""

    profiled_updates: int
    first_updates: int
    """Before the clock starts, with all workers up."""
    filling_s: float
    """At most, for a buffer to fill."""
    window_s: float
    """At least; a rate is taken over each of a few windows."""


FULL = Lengths(profiled_updates=200, first_updates=40, filling_s=30.0, window_s=1.5)
QUICK = Lengths(profiled_updates=30, first_updates=2, filling_s=0.05, window_s=0.02)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a measurement."""

    updates: int
    seconds: float


def rate(windows: list[Window]) -> Spread:
    """Updates a second, over all windows together, with the slowest and the fastest."""
    rates = [window.updates / window.seconds for window in windows]
    total = sum(window.updates for window in windows) / sum(window.seconds for window in windows)
    return Spread(total, min(rates), max(rates))


class Cached(Dataset[Any]):
    """What the stages up to one return, made once for `num_kept` examples that stand for all others too."""

    def __init__(self, before: stretto.StagedDataset, num_kept: int) -> None:
        self._kept = [before[index] for index in range(num_kept)]
        self._length = len(before)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._kept[index % len(self._kept)]


class Trial:
    """A job with a change to its loader."""

    def __init__(self, job: Job, change: dict[str, Any], buffer_items: int | None, lengths: Lengths) -> None:
        self._job = job
        self._lengths = lengths
        self._buffer_items = buffer_items
        self._counts_epochs = change.get("persistent_workers", False)
        self._dataset = job.dataset(job.num_batches if self._counts_epochs else _ENDLESS)
        self._change = dict(change)
        if (name := self._change.pop("cache_after", None)) is not None:
            before, after = self._dataset.split(name)
            num_kept = job.num_batches * job.batch_size if lengths is FULL else job.batch_size
            self._dataset = stretto.StagedDataset(Cached(before, num_kept), **after.stages)

    def __call__(self) -> list[Window]:
        """What was counted."""
        gc.collect()
        change = self._change
        common: dict[str, Any] = {"batch_size": self._job.batch_size, "num_workers": self._job.num_workers}
        if "echo_after" in change:
            inside = stretto.EchoDataLoader(self._dataset, **common, buffer=self._buffer_items, **change)
            return self._rates(inside, inside.stats)
        plain = DataLoader(self._dataset, **common)
        if "unit" in change:
            with stretto.echo(plain, buffer=self._buffer_items, **change) as around:
                return self._rates(around, around.stats)
        return self._rates(DataLoader(self._dataset, **common | change), None)

    def _rates(self, loader: Any, read_stats: Callable[[], stretto.EchoStats] | None) -> list[Window]:
        """Windows end with a cycle of fresh batches, or with an epoch."""
        trainer, start_s = Trainer(self._job.step_s), time.perf_counter()
        per_cycle = self._job.num_batches if self._counts_epochs else self._job.cycle
        window_s = self._lengths.window_s * (3 if self._job.cycle > 1 else 1)  # stalls come at random in an echo
        windows: list[Window] = []
        since: tuple[float, int] | None = None
        last_cycle = 0
        for number, batch in enumerate(epochs(loader)):
            now = time.perf_counter()
            stats = None if read_stats is None else read_stats()
            num_fresh = number if stats is None else stats.fresh_items // self._items_in_batch
            if num_fresh // per_cycle != last_cycle:
                last_cycle = num_fresh // per_cycle
                if since is not None and now - since[0] >= window_s:
                    windows.append(Window(number - since[1], now - since[0]))
                    if len(windows) == _WINDOWS:
                        break
                    since = now, number
                elif since is None and number >= self._lengths.first_updates:
                    is_full = stats is None or stats.resident_items >= self._steady_items
                    since = (now, number) if is_full or now - start_s > self._lengths.filling_s else None
            trainer.step(batch)
        return windows

    @property
    def _items_in_batch(self) -> int:
        return 1 if self._change.get("unit") == "batch" else self._job.batch_size

    @property
    def _steady_items(self) -> float:
        """Residents of a full buffer. In workers those that wait for their first use are not there yet."""
        items = _FULL * (self._buffer_items or 0)
        return items * (1 - 1 / self._change["factor"]) if "echo_after" in self._change else items


def profile(name: str, lengths: Lengths) -> RunRecord:
    """The record of the job's script under `stretto run`."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["python", starved.__file__, name, "--updates", str(lengths.profiled_updates)]
        record = run_script([*command, "--out", str(Path(directory) / "seconds")], RunOptions())
    assert record["exit_code"] == 0, record
    return record


def measure(report: Report, name: str, lengths: Lengths) -> None:
    job = JOBS[name] if lengths is FULL else replace(JOBS[name], num_batches=4)
    record = profile(name, lengths)
    rank = record["ranks"][0]
    report.note(f"{job.title}: R = {rank['loaders'][0]['ratio']:.2f}. {record['verdict']}")
    advice = {title(one): one for one in record["advice"] if one["updates_per_s"] and one["speedup"] != 1.0}
    trials = {"as it is": Trial(job, {}, None, lengths)}
    for what, one in advice.items():
        trials[what] = Trial(job, one["change"], one["buffer_items"], lengths)
    windows: dict[str, list[Window]] = {what: [] for what in trials}
    for turn in range(report.arguments.rounds):
        for what in trials if turn % 2 == 0 else reversed(trials):
            windows[what] += trials[what]()
    profiled = 1e3 / (rank["wait_ms"]["mean"] + rank["step_ms"]["mean"])
    for what, measured in ((what, rate(counted)) for what, counted in windows.items()):
        known, known_rate, bars = "profiled", float(profiled), {}
        if what in advice:
            known, known_rate, bars = (
                "predicted",
                advice[what]["updates_per_s"] or 0.0,
                {"at_least": 0.9, "at_most": 1.1},
            )
        report.add(f"{job.title}, {what}: {known} {known_rate:.1f}", measured, "updates/s")
        ratios = Spread(known_rate / measured.median, known_rate / measured.high, known_rate / measured.low)
        report.add(f"  {known} / measured", ratios, "", **bars)


def title(one: AdviceRecord) -> str:
    """Such as "echo_after=read, factor=3"."""
    return ", ".join(f"{name}={value}" for name, value in one["change"].items())


def table(results: list[dict[str, Any]]) -> str:
    """For docs/profile.md: updates a second, of each job and piece of advice."""
    lines = ["| job | change | predicted | measured | predicted / measured |", "|---|---|---:|---:|---:|"]
    for rate_of, ratio_of in zip(results[::2], results[1::2], strict=True):
        (job, what), known = rate_of["what"].rsplit(":", 1)[0].split(", ", 1), rate_of["what"].rsplit(" ", 1)[1]
        missed = " (missed)" if ratio_of["reached"] is False else ""
        numbers = f"{rate_of['median']:.1f} | {ratio_of['median']:.2f}{missed}"
        if what == "as it is":
            lines.append(f"| **{job}** | none: as profiled | {known} | {numbers} |")
        else:
            lines.append(f"| {job} | `{what}` | {known} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=1)
    report = Report("advice", arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they sleep
    warnings.filterwarnings("ignore", "the data set or its sampler draws")  # costs are counted, nothing is learnt
    for name in ["slow-decode"] if arguments.quick else JOBS:
        measure(report, name, QUICK if arguments.quick else FULL)
    report.finish()
    if not arguments.quick and arguments.out is None:
        write_table("docs/profile.md", "advice", table(report.results))


if __name__ == "__main__":
    main()
