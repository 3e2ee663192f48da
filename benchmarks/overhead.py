"""What stretto's loop costs by itself, where source and step leave no time to hide in.

Examples: an instant source of 256 x 3 x 64 x 64 uint8 batches, factor 4, default buffer. Every batch is gathered
from the pool while the background thread copies fresh ones in. Against a bare gather of as many rows, indices
ready made, through the same view of the same pool. torch's own index_select stands beside it: it uses all of
torch's threads, so it is faster on idle cores and many times slower on busy ones.

Batches: unit="batch", copy=False, with a source and a step that both hold the GIL for 200 us. Against the plain
loop that does the same work: a fetch, then four steps. MONAI's ThreadDataLoader(repeats=4) stands beside it.
Turns are short and many, because 20 us is less than a machine's speed moves in a second.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from harness import Report, Spread, difference, parse_arguments, ratio, take_turns
from torch.utils.data import DataLoader, IterableDataset, default_convert

import stretto

try:
    from monai.data.thread_buffer import ThreadDataLoader
except ImportError:
    ThreadDataLoader = None

B, SHAPE, FACTOR = 256, (3, 64, 64), 4
WORK_S = 200e-6


def instant_source(length: int) -> list[torch.Tensor]:
    """The same few batches over and over, `length` a pass."""
    batches = [torch.randint(0, 256, (B, *SHAPE), dtype=torch.uint8) for _ in range(8)]
    return [batches[at % len(batches)] for at in range(length)]


class BusySource(IterableDataset[torch.Tensor]):
    """Batches that each take `count` additions under the GIL."""

    def __init__(self, length: int, count: int) -> None:
        self._length = length
        self._count = count
        self._batch = torch.zeros((B, *SHAPE), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self._length):
            work(self._count)
            yield self._batch


def work(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def calibrate() -> int:
    """Additions that take WORK_S when nothing disturbs them."""
    count = 10_000
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        work(count)
        best = min(best, time.perf_counter() - start)
    return round(count * WORK_S / best)


def measure_examples(report: Report, length: int) -> None:
    with stretto.echo(instant_source(length), FACTOR) as loader:
        while loader.stats().resident_items < 63 * B:  # the buffer is full
            for _ in loader:
                pass
        residents = loader._stream.residents
        assert residents is not None
        [leaf] = residents.buffer._leaves  # type: ignore[union-attr]
        rng = np.random.default_rng(0)
        slots = [rng.choice(leaf._pool.shape[0], B, replace=False).astype(np.int32) for _ in range(256)]
        num_updates = length * FACTOR

        def bare() -> float:
            start = time.perf_counter()
            for at in range(num_updates):
                leaf.take(slots[at % len(slots)])
            return B * num_updates / (time.perf_counter() - start)

        def with_torch() -> float:
            indices = [torch.from_numpy(some) for some in slots]
            start = time.perf_counter()
            for at in range(num_updates):
                torch.index_select(leaf._pool, 0, indices[at % len(indices)])
            return B * num_updates / (time.perf_counter() - start)

        def echoed() -> float:
            start = time.perf_counter()
            rows = sum(len(batch) for batch in loader)
            assert rows == B * num_updates
            return rows / (time.perf_counter() - start)

        competitors = {"echo": echoed, "bare": bare, "torch": with_torch}
        rates = take_turns(competitors, report.arguments.rounds)
    report.add("bare gather through the pool's view", Spread.of(rates["bare"]), "examples/s")
    report.add("torch.index_select on the pool", Spread.of(rates["torch"]), "examples/s")
    report.add('stretto.echo, unit="example"', Spread.of(rates["echo"]), "examples/s")
    report.add("stretto.echo / bare gather", ratio(rates["echo"], rates["bare"]), "", at_least=0.7)
    report.add("stretto.echo / torch.index_select", ratio(rates["echo"], rates["torch"]), "")


def measure_batches(report: Report, length: int, work_count: int) -> None:
    """Microseconds a batch that each loader adds to the plain loop."""
    source = BusySource(length, work_count)
    num_updates = length * FACTOR

    def steps(batches: Iterable[Any], each: int) -> float:
        start = time.perf_counter()
        done = 0
        for _ in batches:
            for _ in range(each):
                work(work_count)
                done += 1
        assert done == num_updates
        return 1e6 * (time.perf_counter() - start) / num_updates

    with stretto.echo(DataLoader(source, batch_size=None), FACTOR, unit="batch", copy=False) as loader:
        competitors = {
            "plain": lambda: steps(DataLoader(source, batch_size=None), FACTOR),
            "echo": lambda: steps(loader, 1),
        }
        if ThreadDataLoader is not None:
            monai_loader = ThreadDataLoader(source, batch_size=None, collate_fn=default_convert, repeats=FACTOR)
            competitors["monai"] = lambda: steps(monai_loader, 1)
        times = take_turns(competitors, report.arguments.rounds)
    what = "source and step of 200 us" if work_count else "instant source and step"
    bar = 20.0 if work_count else None
    report.add(f"{what}: plain loop", Spread.of(times["plain"]), "us/batch")
    report.add(f"{what}: stretto.echo adds", difference(times["echo"], times["plain"]), "us/batch", at_most=bar)
    if "monai" in times:
        report.add(f"{what}: ThreadDataLoader adds", difference(times["monai"], times["plain"]), "us/batch")


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=40)
    report = Report("overhead", arguments)
    if ThreadDataLoader is None:
        report.note("MONAI is not installed, so it is left out: pip install --no-deps monai")
    measure_examples(report, 20 if arguments.quick else 50)
    measure_batches(report, 25 if arguments.quick else 50, calibrate())
    measure_batches(report, 50 if arguments.quick else 250, 0)
    report.finish()


if __name__ == "__main__":
    main()
