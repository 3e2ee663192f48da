"""Whether "auto" uses the time that the loader leaves, and no more.

A paced source takes R times as long for a batch as a step: the realised factor should be max(1, R). A bursty one
yields 25 batches at a step's pace and then stalls for 50 steps (R = 3 on average), which the buffer should
bridge: accelerator utilisation (AU, time in steps / total time without the first wait) by the EchoLoader's
statistics and by this script's own clock.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from harness import Report, Spread, parse_arguments, take_turns

import stretto

STEP_S = 20e-3
B = 32
BURST, STALL_STEPS = 25, 50
FACTORS = (0.5, 1.0, 2.0, 3.0)


class PacedSource:
    """Small batches: `burst` of them `interval_s` apart, then `stall_s` before the next; endless."""

    def __init__(self, interval_s: float, burst: int = 1, stall_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self.burst = burst
        self._stall_s = stall_s
        self._batch = torch.zeros(B, 64)

    def __iter__(self) -> Iterator[torch.Tensor]:
        num_batches = 0
        while True:
            stalls = num_batches > 0 and num_batches % self.burst == 0
            time.sleep(self._interval_s + self._stall_s * stalls)
            num_batches += 1
            yield self._batch


@dataclass(slots=True)
class Run:
    """What one run measured."""

    factor: float
    """Realised, between the ends of two bursts."""
    au_percent: float
    own_au_percent: float


def run(source: PacedSource, num_updates: int, step_s: float) -> Run:
    in_steps = 0.0
    ends: dict[int, int] = {}
    """Batches admitted at the end of a burst -> updates made by then."""
    with stretto.echo(source, "auto", updates_per_epoch=num_updates) as loader:
        begin = 0.0
        for at, _ in enumerate(loader):
            step_begins = time.perf_counter()
            begin = begin or step_begins
            num_batches = loader.stats().fresh_batches
            if num_batches % source.burst == 0:
                ends.setdefault(num_batches, at)
            time.sleep(step_s)
            in_steps += time.perf_counter() - step_begins
        own_au = 100 * in_steps / (time.perf_counter() - begin)
        stats = loader.stats()
    first, last = min(ends), max(ends)
    factor = (ends[last] - ends[first]) / (last - first)
    return Run(factor, 100 * stats.step_s / (stats.total_s - stats.first_wait_s), own_au)


def measure(report: Report, arguments: argparse.Namespace) -> None:
    step_s = STEP_S / 8 if arguments.quick else STEP_S
    updates = 40 if arguments.quick else 240
    bursts = 2 if arguments.quick else 6
    runs: list[Run] = []

    def paced(r: float) -> float:
        return run(PacedSource(r * step_s), updates, step_s).factor

    def bursty() -> float:
        source = PacedSource(step_s, BURST, STALL_STEPS * step_s)
        runs.append(run(source, bursts * (BURST + STALL_STEPS), step_s))
        return runs[-1].factor

    competitors = {**{f"{r}": (lambda r=r: paced(r)) for r in FACTORS}, "bursty": bursty}
    factors = take_turns(competitors, arguments.rounds, warm_up=not arguments.quick)
    for r in FACTORS:
        wanted = max(1.0, r)
        what = f"paced source, R = {r:g}: realised factor"
        report.add(what, Spread.of(factors[f"{r}"]), "uses", at_least=0.9 * wanted, at_most=1.1 * wanted)
    report.add(
        "bursty source, R = 3: realised factor", Spread.of(factors["bursty"]), "uses", at_least=2.7, at_most=3.3
    )
    measured = runs[-arguments.rounds :]  # a round before warms up
    report.add("bursty source: AU by stats()", Spread.of([r.au_percent for r in measured]), "%", at_least=95)
    report.add("bursty source: AU by own clock", Spread.of([r.own_au_percent for r in measured]), "%", at_least=95)


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=3)
    report = Report("auto_factor", arguments)
    measure(report, arguments)
    report.finish()


if __name__ == "__main__":
    main()
