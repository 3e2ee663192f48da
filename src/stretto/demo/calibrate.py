"""Measures t_down and t_up, and sets the link's rate so that R = t_up / t_down is what was asked for."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from stretto.demo.conditions import BATCH_SIZE, NUM_WORKERS
from stretto.demo.interrupts import interrupts_put_off
from stretto.demo.job import Augment, Batch, Trainer
from stretto.demo.link import Link
from stretto.demo.reader import ShardDataset

DELAY_S = 0.010  # each way: a request and its answer take 20 ms, as in one region of a cloud
TOLERANCE = 0.10
_WARMUP = 5
_UPDATES = 40
_FRESH = 12
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured, in seconds; the rate is None for a store of the user's own."""

    t_down_s: float
    t_up_s: float
    rate_bytes_per_s: float | None

    @property
    def ratio(self) -> float:
        """R: how many updates the accelerator could make while one fresh batch arrives."""
        return self.t_up_s / self.t_down_s


def measure_t_down(images: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds of one update on data in memory, augmentation included: the median of 40."""
    trainer, augment = Trainer(seed=0), Augment(seed=0)
    batch: Batch = (images[:BATCH_SIZE], labels[:BATCH_SIZE])
    times = []
    for _ in range(_WARMUP + _UPDATES):
        began = time.perf_counter()
        trainer.step(augment(batch))
        times.append(time.perf_counter() - began)
    return statistics.median(times[_WARMUP:])


def measure_t_up(dataset: ShardDataset) -> float:
    """Seconds between fresh batches, of the data set's `batch_size`, with nothing downstream, after the start."""
    loader: DataLoader[Any] = DataLoader(dataset, dataset.batch_size, num_workers=NUM_WORKERS, drop_last=True)
    with interrupts_put_off():
        batches = iter(loader)
    for _ in range(NUM_WORKERS):
        next(batches)
    began = time.perf_counter()
    for _ in range(_FRESH):
        next(batches)
    return (time.perf_counter() - began) / _FRESH


def set_ratio(
    link: Link, dataset: ShardDataset, t_down_s: float, ratio: float, batch_bytes: float, say: Callable[[str], None]
) -> Speeds:
    """Find the rate per connection at which R is `ratio` within 10 %.

    Raises RuntimeError if no rate does, with the nearest R.
    """
    wanted_s = ratio * t_down_s
    transfer_s = max(1e-4, wanted_s * NUM_WORKERS - 2 * DELAY_S)
    speeds = Speeds(t_down_s, float("inf"), None)
    for _ in range(_ROUNDS):
        rate = batch_bytes / transfer_s
        link.set_rate(rate)
        found = Speeds(t_down_s, measure_t_up(dataset), rate)
        say(f"{rate / 1000:,.0f} kB/s per connection: t_up = {1000 * found.t_up_s:.0f} ms, R = {found.ratio:.2f}")
        if abs(found.ratio - ratio) < abs(speeds.ratio - ratio):
            speeds = found
        if abs(found.ratio / ratio - 1) <= TOLERANCE / 3:
            break
        transfer_s = max(1e-4, transfer_s + NUM_WORKERS * (wanted_s - found.t_up_s))
    if abs(speeds.ratio / ratio - 1) > TOLERANCE:
        raise RuntimeError(
            f"no rate of the link gives R = {ratio:g} within 10 %: the nearest is R = {speeds.ratio:.2f} (t_up = "
            f"{1000 * speeds.t_up_s:.0f} ms, t_down = {1000 * t_down_s:.0f} ms). Is the machine busy? "
            "Ask for a larger --ratio"
        )
    assert speeds.rate_bytes_per_s is not None
    link.set_rate(speeds.rate_bytes_per_s)
    return speeds
