"""What a buffer of "2GiB" costs: the proportional set size of 4 workers, over 50,000 batches.

Examples are arrays of 40 to 120 kB, a different size each, so that the allocator has to find room of another size
for each one that leaves. The bound in bytes is turned into a count from 64 of them; what the workers really take is
theirs plus what lies idle between. A batch is collated into one number, so that nothing else is large.

PSS is what the kernel counts as a process's part of its pages, those that it shares with others divided among them.
It is summed over the workers of EchoDataLoader(factor=4, buffer="2GiB"), at points from when the buffer is full on.
That of the same loader at factor=1, which keeps nothing, is subtracted.
"""

import itertools
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from harness import Report, Spread, parse_arguments
from torch.utils.data import Dataset

import stretto

NUM_WORKERS, B, FACTOR, NUM_POINTS = 4, 32, 4, 21
LEAST_BYTES, MOST_BYTES = 40_000, 120_000
NUM_TURNOVERS = 4
"""After two (the time to use as many examples up as there is room for) the buffer is full."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A run."""

    buffer_mib: int
    num_batches: int
    """Over which PSS is watched, from when the buffer is full on."""

    @property
    def name(self) -> str:
        return f"{self.buffer_mib}MiB"

    @property
    def buffer_bytes(self) -> int:
        return self.buffer_mib << 20


class Arrays(Dataset[Any]):
    """Arrays of sizes spread evenly between two, each a function of its index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        num_bytes = LEAST_BYTES + index * 2_654_435_761 % 2**32 % (MOST_BYTES - LEAST_BYTES)
        return np.full(num_bytes, index % 256, dtype=np.uint8)


def count_bytes(examples: list[np.ndarray[Any, Any]]) -> int:
    return sum(map(len, examples))


def make_loader(setting: Setting, factor: int) -> stretto.EchoDataLoader:
    # Twice what is needed: an epoch whose end, where the buffer drains, is never reached.
    num_resident = 2 * setting.buffer_bytes // (LEAST_BYTES + MOST_BYTES)
    length = 2 * (B * setting.num_batches // FACTOR + NUM_TURNOVERS * num_resident)
    return stretto.EchoDataLoader(
        Arrays(length),
        batch_size=B,
        shuffle=True,
        num_workers=NUM_WORKERS,
        collate_fn=count_bytes,
        factor=factor,
        buffer=setting.name,
    )


def pss_of_workers() -> float:
    """Bytes, of all child processes."""
    workers = multiprocessing.active_children()
    assert len(workers) == NUM_WORKERS, workers
    return float(sum(psutil.Process(worker.pid).memory_full_info().pss for worker in workers))


def advance(batches: Iterator[int], count: int) -> None:
    for _ in range(count):
        next(batches)


def pss_without_buffer(setting: Setting) -> float:
    loader = make_loader(setting, 1)
    batches = iter(loader)
    advance(batches, max(100, setting.num_batches // 50))
    return pss_of_workers()


def pss_with_buffer(setting: Setting, report: Report) -> tuple[list[int], list[float]]:
    """Batches since the buffer was full, and PSS then."""
    loader = make_loader(setting, FACTOR)
    batches = iter(loader)
    next(batches)
    num_residents = loader.state_dict()["num_residents"]
    num_filling = NUM_TURNOVERS * FACTOR * num_residents // B
    advance(batches, num_filling)
    held = loader.stats().resident_items
    report.note(
        f"after {num_filling:,} batches, {held:,} examples are held; the plan has room for {num_residents:,}"
    )
    at = np.linspace(0, setting.num_batches, NUM_POINTS).astype(int).tolist()
    pss = [pss_of_workers()]
    for last, number in itertools.pairwise(at):
        advance(batches, number - last)
        pss.append(pss_of_workers())
    stats = loader.stats()
    report.note(
        f"at the end {stats.resident_items:,} examples of {stats.buffer_bytes / 2**20:,.0f} MiB are held; "
        f"{stats.reread:,} of {stats.reads:,} reads were of one that had been read before"
    )
    return at, pss


def measure(report: Report, setting: Setting) -> None:
    lowest, highest, trends, every = [], [], [], []
    for _ in range(report.arguments.rounds):
        without = pss_without_buffer(setting)
        at, pss = pss_with_buffer(setting, report)
        parts = [(value - without) / setting.buffer_bytes for value in pss]
        for number, part in zip(at, parts, strict=True):
            report.note(f"after {number:>6,} batches: {part * setting.buffer_bytes / 2**20:>8,.1f} MiB")
        lowest.append(min(parts))
        highest.append(max(parts))
        trends.append(100 * setting.num_batches * float(np.polyfit(at, parts, 1)[0]))
        every += parts
    report.add(f"added PSS / {setting.name}: at all points", Spread.of(every), "")
    report.add(f"added PSS / {setting.name}: lowest", Spread.of(lowest), "", at_least=0.9)
    report.add(f"added PSS / {setting.name}: highest", Spread.of(highest), "", at_most=1.1)
    what = f"trend over {setting.num_batches:,} batches"
    report.add(what, Spread.of(trends), f"% of {setting.name}", at_least=-2, at_most=2)


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=1)
    if not sys.platform.startswith("linux"):
        sys.exit(f"the proportional set size is known on Linux only, and this is {sys.platform}")
    report = Report("memory", arguments)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
    if arguments.quick:
        measure(report, Setting(64, 400))
    else:
        measure(report, Setting(2048, 50_000))
    report.finish()


if __name__ == "__main__":
    main()
