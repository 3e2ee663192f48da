"""A split model whose input is starved: echoing the data, breaking the locks between blocks, and both.

ResNet-20 over two processes of one thread, computing for real. Its loader reads ahead in the background and gives a
fresh batch of 64 images every third of DSP's steps, as a slow store would. Each cure alone, both, and neither take
turns. Accelerator utilisation: the part of the time in which a block computes, the mean of both blocks. With DSP it
has the first block's recompute in it.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Report, Spread, parse_arguments, ratio, take_turns
from pipeline_common import (
    Batch,
    Crew,
    State,
    Trainer,
    Way,
    balanced_cuts,
    cut,
    make_layers,
    seconds_per_step,
    stale_ways,
)
from torch.nn.functional import cross_entropy

import stretto

K = 2
SPLIT, DSP, _ = stale_ways(K)
R = 3.0
"""Seconds between two fresh batches, in DSP's steps."""


@dataclass(frozen=True, slots=True)
class Cure:
    """How a run is cured."""

    name: str
    way: Way
    echoes: bool


CURES = (
    Cure("neither", SPLIT, echoes=False),
    Cure("echo", SPLIT, echoes=True),
    Cure("DSP", DSP, echoes=False),
    Cure("both", DSP, echoes=True),
)


@dataclass(frozen=True, slots=True)
class SlowStore:
    """A loader that waits before each of its batches."""

    batches: list[Batch]
    wait_s: float

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            time.sleep(self.wait_s)
            yield batch


class Busy:
    """When a block computed."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            self._spans.append((begin, time.perf_counter()))
            return result

        return timed

    def share(self, begin: float, end: float) -> float:
        """The part of the time from `begin` to `end`."""
        inside = [max(0.0, min(last, end) - max(first, begin)) for first, last in self._spans]
        self._spans.clear()
        return sum(inside) / (end - begin)


def make_batches(batch_size: int) -> list[Batch]:
    """Sixteen."""
    return [(torch.rand(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))) for _ in range(16)]


def make_trainer(state: State, way: Way, depth: int, first: int) -> None:
    """Block `rank`, watched; the first block has `first` layers."""
    layers = make_layers(depth)
    block = cut(layers, (first, len(layers) - first))[state["rank"]]
    trainer = Trainer(way, block, state["rank"], K, cross_entropy)
    busy = Busy()
    watched = trainer.schedule.block
    watched.forward, watched.backward = busy.watch(watched.forward), busy.watch(watched.backward)
    state[way.name] = trainer, busy


def unstarved(state: State, way: Way, batch_size: int, num_steps: int, warmup: int) -> float:
    """Seconds a step with batches at hand."""
    batches = itertools.islice(itertools.cycle(make_batches(batch_size)), num_steps)
    return seconds_per_step(state[way.name][0].train(batches), warmup)


def open_loader(state: State, cure: Cure, batch_size: int, wait_s: float) -> None:
    """On rank 0: batches without an end."""
    if state["rank"] == 0:
        store = SlowStore(make_batches(batch_size), wait_s)
        loader = stretto.echo(store, factor="auto" if cure.echoes else 1.0)
        state[cure] = loader, itertools.chain.from_iterable(itertools.repeat(loader))


def train(state: State, cure: Cure, num_steps: int, warmup: int) -> tuple[float, float]:
    """Seconds a step, and the part of the time in which this block computed."""
    trainer, busy = state[cure.way.name]
    batches = itertools.islice(state[cure][1], num_steps) if state["rank"] == 0 else None
    ends = trainer.train(batches)
    return seconds_per_step(ends, warmup), busy.share(ends[warmup - 1], ends[-1])


def realised_factor(state: State, cure: Cure) -> float:
    """Uses of an example, on rank 0."""
    return state[cure][0].stats().factor if state["rank"] == 0 else 0.0


def compare(report: Report, crew: Crew, depth: int, batch_size: int, num_steps: int, warmup: int) -> list[str]:
    """The four take turns. Returns the rows of the table."""
    first = crew.run(balanced_cuts, depth, batch_size, (SPLIT, DSP))[0]
    for way in (SPLIT, DSP):
        crew.run(make_trainer, way, depth, first[way.name])
    for way in (SPLIT, DSP):
        free_s = min(crew.run(unstarved, way, batch_size, num_steps // 2, warmup // 2)[0] for _ in range(3))
        report.note(f"{way.name}, batches at hand: {1e3 * free_s:.1f} ms a step, {first[way.name]} layers first")
    for cure in CURES:
        crew.run(open_loader, cure, batch_size, R * free_s)
    shares: dict[Cure, list[float]] = {cure: [] for cure in CURES}

    def run(cure: Cure) -> float:
        of_ranks = crew.run(train, cure, num_steps, warmup)
        shares[cure].append(100 * statistics.mean(share for _, share in of_ranks))
        return 1 / of_ranks[0][0]

    rates = take_turns({cure.name: partial(run, cure) for cure in CURES}, report.arguments.rounds)
    rows = []
    for cure in CURES:
        updates = Spread.of(rates[cure.name])
        gain = ratio(rates[cure.name], rates["neither"])
        busy = Spread.of(shares[cure][1:])
        factor = crew.run(realised_factor, cure)[0]
        report.add(f"{cure.name}: updates", updates, "a second")
        report.add(f"{cure.name}: updates relative to neither", gain, "times")
        report.add(f"{cure.name}: accelerator utilisation", busy, "%")
        report.note(f"{cure.name}: an example was used {factor:.2f} times")
        rows.append(f"| {cure.name} | {updates} | {gain} | {busy} | {factor:.1f} |")
    return rows


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=7)
    depth, batch_size, num_steps, warmup = (8, 8, 8, 4) if arguments.quick else (20, 64, 80, 30)
    with Crew(K) as crew:
        report = Report("both", arguments)
        rows = compare(report, crew, depth, batch_size, num_steps, warmup)
    head = [
        "| cure | updates a second | relative to neither | AU % | uses of an example |",
        "|---|---|---|---|---|",
    ]
    report.finish("\n".join(head + rows), "docs/pipelining.md")


if __name__ == "__main__":
    main()
