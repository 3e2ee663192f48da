"""One condition's training run: to the target accuracy, with both clocks and where the time went."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from stretto.demo.conditions import BATCH_SIZE, Condition
from stretto.demo.interrupts import interrupts_put_off
from stretto.demo.job import Batch, Trainer
from stretto.demo.reader import ShardDataset


@dataclass(slots=True)
class Point:
    """The test accuracy at one moment."""

    seconds: float
    updates: int
    fresh_examples: int
    accuracy: float


@dataclass(slots=True)
class Outcome:
    """How a run went. Times leave out the evaluations, during which the link stands still."""

    condition: str
    title: str
    seed: int
    reached: bool = False
    updates: int = 0
    fresh_examples: int = 0
    wait_s: float = 0.0
    draw_s: float = 0.0
    step_s: float = 0.0
    curve: list[Point] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Training time."""
        return self.wait_s + self.draw_s + self.step_s

    @property
    def au_percent(self) -> float:
        """Accelerator utilisation: time in update steps / total time, in percent."""
        return 100 * self.step_s / self.seconds if self.seconds else 0.0

    @property
    def stall_percent(self) -> float:
        """Time waited for data / total time, in percent."""
        return 100 * self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def factor(self) -> float:
        """The realised echoing factor."""
        return self.updates * BATCH_SIZE / self.fresh_examples if self.fresh_examples else 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """When a run ends: at the target accuracy (percent) on the test set, or after so many updates or seconds."""

    images: Tensor
    labels: Tensor
    target: float
    evaluate_every: int
    max_updates: int
    max_seconds: float


def race(
    condition: Condition,
    dataset: ShardDataset,
    goal: Goal,
    seed: int,
    link_paused: Callable[[], AbstractContextManager[None]],
    show: Callable[[Outcome], None],
) -> Outcome:
    """Train from the same initial weights until the goal. `show` is called after every update."""
    outcome = Outcome(condition.name, condition.title, seed)
    trainer = Trainer(seed)
    feed, echoed = condition.feed(dataset, seed)
    batches = _endless(feed, None if echoed is not None else dataset)
    try:
        while not outcome.reached and outcome.updates < goal.max_updates and outcome.seconds < goal.max_seconds:
            began = time.perf_counter()
            waited_before = echoed.stats().wait_s if echoed is not None else 0.0
            batch = next(batches)
            fetched = time.perf_counter()
            trainer.step(batch)
            stepped = time.perf_counter()
            outcome.step_s += stepped - fetched
            outcome.updates += 1
            if echoed is None:
                outcome.wait_s += fetched - began
                outcome.fresh_examples += len(batch[1])
            else:
                stats = echoed.stats()
                outcome.wait_s += stats.wait_s - waited_before
                outcome.draw_s += fetched - began - (stats.wait_s - waited_before)
                outcome.fresh_examples = stats.fresh_batches * BATCH_SIZE
            if outcome.updates % goal.evaluate_every == 0:
                with link_paused():
                    accuracy = trainer.accuracy(goal.images, goal.labels)
                outcome.curve.append(Point(outcome.seconds, outcome.updates, outcome.fresh_examples, accuracy))
                outcome.reached = accuracy >= goal.target
            show(outcome)
    finally:
        batches.close()
        if echoed is not None:
            echoed.close()
    return outcome


def _endless(feed: Iterable[Batch], dataset: ShardDataset | None) -> Generator[Batch, None, None]:
    """Batches of epoch after epoch; the plain loader's data set is told each epoch, as a trainer does."""
    epoch = 0
    while True:
        if dataset is not None:
            dataset.set_epoch(epoch)
        with interrupts_put_off():
            batches = iter(feed)
        yield from batches
        epoch += 1
