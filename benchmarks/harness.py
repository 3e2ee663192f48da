"""What every benchmark shares: turns, spreads, bars, and the record of a run.

Competitors are measured in one job, one after the other, round after round, because a machine's speed drifts
more than they differ. A ratio is that of the medians over the rounds; its spread is that of the rounds' own ratios.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("stretto", "torch", "numpy", "pillow", "albumentations", "monai")


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over rounds, with the quartiles where there are enough rounds, else the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 8:
            return cls(statistics.median(values), min(values), max(values))
        low, median, high = statistics.quantiles(values, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} .. {_short(self.high)})"


def take_turns(
    competitors: dict[str, Callable[[], float]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Call every competitor once a round, in an order that is reversed every other round.

    Each returns its own measurement. A round before the first is thrown away: it warms up.
    """
    measured: dict[str, list[float]] = {name: [] for name in competitors}
    names = list(competitors)
    for turn in range(0 if warm_up else 1, rounds + 1):
        for name in names if turn % 2 else reversed(names):
            gc.collect()
            value = competitors[name]()
            if turn:
                measured[name].append(value)
    return measured


def ratio(measured: Sequence[float], reference: Sequence[float]) -> Spread:
    """Measured / reference: of the medians, and of each round."""
    of_rounds = Spread.of([a / b for a, b in zip(measured, reference, strict=True)])
    return Spread(statistics.median(measured) / statistics.median(reference), of_rounds.low, of_rounds.high)


def difference(measured: Sequence[float], reference: Sequence[float]) -> Spread:
    """Measured - reference: of the medians, and of each round."""
    of_rounds = Spread.of([a - b for a, b in zip(measured, reference, strict=True)])
    return Spread(statistics.median(measured) - statistics.median(reference), of_rounds.low, of_rounds.high)


@dataclass(slots=True)
class Report:
    """The lines of one benchmark, printed as they come and written as JSON at the end."""

    name: str
    arguments: argparse.Namespace
    results: list[dict[str, Any]] = field(default_factory=list)
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        versions = " ".join(f"{name} {version}" for name, version in _versions().items())
        print(f"{self.name}: {versions}; {_machine()}{', quick: too short to judge' * self.arguments.quick}")

    def add(
        self, what: str, value: Spread, unit: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Record a result, and whether its median is within the bar if there is one."""
        low = at_least if at_least is not None else -float("inf")
        high = at_most if at_most is not None else float("inf")
        has_bar = not self.arguments.quick and (at_least is not None or at_most is not None)
        reached = low <= value.median <= high if has_bar else None
        bar = " and ".join(
            f"{sign} {_short(limit)}" for sign, limit in ((">=", at_least), ("<=", at_most)) if limit is not None
        )
        verdict = f"  bar {bar}: {'reached' if reached else 'MISSED'}" if has_bar else ""
        print(f"  {what:<58} {value!s:>34} {unit:<12}{verdict}", flush=True)
        self.results.append(
            {
                "what": what,
                "unit": unit,
                **asdict(value),
                "at_least": at_least,
                "at_most": at_most,
                "reached": reached,
            }
        )

    def note(self, line: str) -> None:
        """Print a remark."""
        print(f"  {line}", flush=True)

    def finish(self, table: str = "", page: str = "") -> None:
        """Write the record to --out, or to results/<name>.json unless --quick; then its `table` into a `page`."""
        load = os.getloadavg()
        print(f"  load average over a minute: {self.load_before[0]:.2f} before, {load[0]:.2f} after")
        out: Path | None = self.arguments.out
        if out is None and not self.arguments.quick:
            out = _RESULTS / f"{self.name}.json"
        if out is None:
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "benchmark": self.name,
            "started": self.started,
            "quick": self.arguments.quick,
            "rounds": self.arguments.rounds,
            "versions": _versions(),
            "machine": _machine(),
            "load_before": self.load_before,
            "load_after": load,
            "results": self.results,
            **({"table": table} if table else {}),
        }
        out.write_text(json.dumps(record, indent=2) + "\n")
        print(f"  wrote {out}")
        if table and self.arguments.out is None:
            write_table(page, self.name, table)


def write_table(page: str, benchmark: str, table: str) -> None:
    """Put what a benchmark found between its marks in a page of the project."""
    path = _RESULTS.parents[1] / page
    start, end = f"<!-- made by benchmarks/{benchmark}.py -->", "<!-- end -->"
    before, rest = path.read_text().split(start)
    after = rest.split(end, 1)[1]
    path.write_text(f"{before}{start}\n{table}\n{end}{after}")


def prepare_process() -> None:
    """Run the script anew with the settings of a process, which are read as it starts.

    OpenMP's threads sleep while they wait: two that spin, with a core taken by someone else, make a step ten times
    as long. glibc keeps the memory that is freed: it hands big tensors back to the kernel otherwise, which has to
    fill the pages of the next one with zeros, a fifth of the time of a step.
    """
    settings = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**27),
    }
    if any(name not in os.environ for name in settings):
        os.environ |= settings | os.environ
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def parse_arguments(description: str | None, *, rounds: int) -> argparse.Namespace:
    """Read --quick, --rounds and --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run shortly, judge nothing and write nothing")
    parser.add_argument("--rounds", type=int, help=f"turns of each competitor (default {rounds}, 1 with --quick)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default benchmarks/results/<name>.json)")
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else rounds
    return arguments


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _machine() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores, {model}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
