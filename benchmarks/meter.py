"""What it costs to be measured: seconds an update of a script under `stretto run`, over those without it.

Three scripts (starved.py), each in pairs of runs: light (2 workers make a batch of 32 in about 5 ms each, through a
Compose of 3, a step takes 5 ms), starved (slow-fetch) and compute-bound (the step computes). The script's own clock
counts, from its 20th update to its last.

What is behind it, in one process: a row, what is done at a fetch and a step, and what timing the stages costs where
batches are made, in CPU time beside that of making them.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import starved
import torch
from harness import Report, Spread, difference, parse_arguments, ratio, take_turns, write_table
from starved import UNHURRIED
from torch.utils.data import DataLoader

from stretto.launch.options import RunOptions
from stretto.launch.parent import script_run
from stretto.profile.hooks import Hooks
from stretto.profile.meter import Meter
from stretto.profile.rows import RowWriter

UPDATES = {"light": 600, "slow-fetch": 120, "computing": 600}
TITLES = {"light": "light loader", "slow-fetch": "starved", "computing": "compute-bound"}


class Instant(DataLoader[Any]):
    """The same batch again and again, with an `__iter__` of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batch = torch.zeros(32, 8)
        while True:
            yield batch


def command(name: str, updates: int, out: Path) -> list[str]:
    return [sys.executable, starved.__file__, name, "--updates", str(updates), "--out", str(out)]


def plain(name: str, updates: int) -> float:
    """Seconds an update."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        subprocess.run(command(name, updates, out), check=True)
        return float(out.read_text())


def metered(name: str, updates: int, sizes: list[float]) -> float:
    """The same under `stretto run`. Appends the bytes an update of all files that the script's processes write."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        with script_run(command(name, updates, out), RunOptions()) as run:
            files = [path.stat().st_size for path in run.directory.rglob("*") if path.is_file()]
        assert [rank["updates"] for rank in run.record["ranks"]] == [updates]
        sizes.append(sum(files) / updates)
        return float(out.read_text())


def measure_scripts(report: Report, updates: dict[str, int]) -> None:
    rounds, is_quick = report.arguments.rounds, report.arguments.quick
    for name, count in updates.items():
        sizes: list[float] = []
        competitors = {
            "plain": lambda: plain(name, count),  # noqa: B023
            "metered": lambda: metered(name, count, sizes),  # noqa: B023
        }
        seconds = take_turns(competitors, rounds, warm_up=not is_quick)
        report.add(f"{TITLES[name]}: an update", Spread.of([1e3 * s for s in seconds["plain"]]), "ms")
        overhead = ratio(seconds["metered"], seconds["plain"])
        report.add(f"{TITLES[name]}: under stretto run / without", overhead, "", at_most=1.01)
        report.add(f"{TITLES[name]}: bytes of the record", Spread.of(sizes), "an update")


@contextmanager
def hooked() -> Iterator[None]:
    """This process is metered."""
    with tempfile.TemporaryDirectory() as directory:
        meter = Meter(Path(directory))
        hooks = Hooks(meter)
        hooks.install()
        try:
            yield
        finally:
            hooks.remove()
            meter.save()


def of_a_row(count: int) -> float:
    """Microseconds."""
    with tempfile.TemporaryDirectory() as directory:
        writer = RowWriter(Path(directory) / "rows", 8, {})
        start = time.perf_counter()
        for number in range(count):
            writer.write(number, 1, 2, 3.0, 4.0, 5.0, 6.0, 7.0)
        seconds = time.perf_counter() - start
        writer.close()
    return 1e6 * seconds / count


def of_an_update(count: int, *, is_metered: bool) -> float:
    """Microseconds of a loop that does nothing else than fetch and step."""
    with hooked() if is_metered else nullcontext():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))])
        batches = iter(Instant(UNHURRIED["light"].dataset(1)))
        start = time.process_time()
        for _ in range(count):
            next(batches)
            optimizer.step()
        return 1e6 * (time.process_time() - start) / count


def of_a_batch(count: int, *, is_metered: bool) -> float:
    """CPU microseconds of making a batch of the light script's."""
    with hooked() if is_metered else nullcontext():
        job = UNHURRIED["light"]
        batches = iter(DataLoader(job.dataset(count + 1), batch_size=job.batch_size))
        next(batches)
        start = time.process_time()
        for _ in range(count):
            next(batches)
        return 1e6 * (time.process_time() - start) / count


def measure_parts(report: Report, scale: int) -> None:
    parts: dict[str, Callable[[], float]] = {
        "row": lambda: of_a_row(1000 * scale),
        "update": lambda: of_an_update(100 * scale, is_metered=False),
        "metered update": lambda: of_an_update(100 * scale, is_metered=True),
        "batch": lambda: of_a_batch(2 * scale, is_metered=False),
        "metered batch": lambda: of_a_batch(2 * scale, is_metered=True),
    }
    costs = take_turns(parts, report.arguments.rounds)
    report.add("a row", Spread.of(costs["row"]), "us")
    report.add("a fetch and a step, with their rows", difference(costs["metered update"], costs["update"]), "us")
    made = difference(costs["metered batch"], costs["batch"])
    report.add("the light loader: CPU to make a batch", Spread.of(costs["batch"]), "us")
    report.add("the light loader: added to it", made, "us")
    report.add("the same as a ratio", ratio(costs["metered batch"], costs["batch"]), "")


def table(results: list[dict[str, Any]]) -> str:
    """For docs/profile.md: each script's update, and what being measured costs it."""
    of = {line["what"]: line for line in results}
    lines = ["| script | an update | under `stretto run` / without (quartiles or extremes) |", "|---|---:|---:|"]
    for title in TITLES.values():
        update, cost = of[f"{title}: an update"], of[f"{title}: under stretto run / without"]
        spread = f"{cost['median']:.3f} ({cost['low']:.3f} .. {cost['high']:.3f})"
        lines.append(f"| {title} | {update['median']:.1f} ms | {spread} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=10)
    report = Report("meter", arguments)
    torch.set_num_threads(1)
    measure_parts(report, 2 if arguments.quick else 100)
    updates = {"light": 30} if arguments.quick else UPDATES
    measure_scripts(report, updates)
    report.finish()
    if not arguments.quick and arguments.out is None:
        write_table("docs/profile.md", "meter", table(report.results))


if __name__ == "__main__":
    main()
