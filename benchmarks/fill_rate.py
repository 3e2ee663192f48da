"""How fast the buffer should fill at a fixed factor: time to a test accuracy on a virtual clock.

The demonstration's training job, R = e = 6, with real training and a clock that counts an update as 1 and a fresh
batch as 6, so that the result does not depend on the machine. FILL_RATE is tried from 1.5 (at 1 the buffer never
grows) to e (one batch an update until it is full), with a small buffer and a large one. "auto" and no echo beside.
"""

from dataclasses import dataclass

import numpy as np
import torch
from harness import Report, Spread, parse_arguments

from stretto.demo.conditions import BATCH_SIZE
from stretto.demo.fashion import load_fashion_mnist
from stretto.demo.job import Augment, Trainer
from stretto.echo import residents as rules
from stretto.echo.buffer import Bound, TensorPool

RATIO = 6
EVALUATE_EVERY = 20


@dataclass(frozen=True, slots=True)
class Setting:
    factor: float | None
    buffer_batches: int
    fill_rate: float = rules.FILL_RATE


def time_to_target(setting: Setting, data: tuple[torch.Tensor, ...], seed: int, target: float, most: int) -> float:
    """Virtual time to the target, in updates' durations."""
    images, labels, test_images, test_labels = data
    order = np.random.default_rng(seed).permutation(len(images))
    trainer, augment = Trainer(seed), Augment(seed)
    rules.FILL_RATE = setting.fill_rate
    num_fresh, clock, next_ready = 0, 0.0, float(RATIO)

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        """The next fresh batch, after waiting for it."""
        nonlocal num_fresh, clock, next_ready
        at = order[np.arange(num_fresh * BATCH_SIZE, (num_fresh + 1) * BATCH_SIZE) % len(order)]
        num_fresh, clock = num_fresh + 1, max(clock, next_ready)
        next_ready += RATIO
        return images[at], labels[at]

    first = fetch()
    pool = TensorPool(first, Bound(setting.buffer_batches * BATCH_SIZE, None), None)
    residents = rules.Residents(pool, setting.factor, 2 * RATIO if setting.factor is None else 1, seed)
    residents.admit(pool.prepare(first), None, 0, 0)
    for update in range(1, most + 1):
        if setting.factor is None:
            ready = next_ready <= clock and residents.fits(pool.prepare(first), evict=True)
        else:
            ready = residents.asks()
        while ready or residents.is_short:
            residents.admit(pool.prepare(fetch()), None, 0, num_fresh * BATCH_SIZE)
            ready = setting.factor is not None and residents.asks()
        trainer.step(augment(residents.draw().batch))
        clock += 1
        if update % EVALUATE_EVERY == 0 and trainer.accuracy(test_images, test_labels) >= target:
            return clock
    return float("inf")


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=3)
    report = Report("fill_rate", arguments)
    torch.set_num_threads(1)
    fashion = load_fashion_mnist()
    num_test = 500 if arguments.quick else 5000
    data = (
        torch.from_numpy(fashion.train_images.copy()).unsqueeze(1),
        torch.from_numpy(fashion.train_labels.astype(np.int64)),
        torch.from_numpy(fashion.test_images[:num_test].copy()).unsqueeze(1),
        torch.from_numpy(fashion.test_labels[:num_test].astype(np.int64)),
    )
    target, most = (50.0, 60) if arguments.quick else (85.0, 2000)
    settings = {"no echo": Setting(1.0, 2), '"auto", at most 12 uses, 32 batches': Setting(None, 32)}
    for buffer in (16,) if arguments.quick else (16, 64):
        for rate in (1.5, 2.0, 3.0, 6.0):
            settings[f"e = 6, {buffer} batches, fill rate {rate:g} / e"] = Setting(6.0, buffer, rate)
    times: dict[str, list[float]] = {}
    for name, setting in settings.items():
        times[name] = [time_to_target(setting, data, seed, target, most) for seed in range(arguments.rounds)]
        gains = [plain / mine for plain, mine in zip(times["no echo"], times[name], strict=True)]
        report.add(name, Spread.of(times[name]), "updates' time")
        report.note(f"sooner than no echo by {Spread.of(gains)}, mean {sum(gains) / len(gains):.2f}")
    report.finish()


if __name__ == "__main__":
    main()
