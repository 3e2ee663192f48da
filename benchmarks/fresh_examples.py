"""Fresh examples to a test accuracy: N(e) / N(1) for each echo point and echoing factor, beside the paper's.

The demonstration's training job on Fashion-MNIST, one learning rate throughout. Only counts matter, so everything
runs in one process, and may run beside other work. N is `stats().fresh_items` at the first evaluation that reaches
the target. What is in the buffer by then has been read and not been used e times, so the buffer has to be small
against N, and large against a batch, so that the uses of an example lie apart: 16 batches, as in the demonstration.

Every finished run is a line of results/fresh_examples_runs.jsonl (beside --out if that is given) and is not run
again. --quick has made-up data. The paper: Choi, Passos, Shallue, Dahl, arXiv 1907.05550.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Report, Spread, parse_arguments, write_table
from torch.utils.data import DataLoader, Dataset

import stretto
from stretto.demo.conditions import BATCH_SIZE
from stretto.demo.fashion import FashionMNIST, UInt8Array, load_fashion_mnist
from stretto.demo.job import SHIFT, Batch, Trainer

Example = tuple[UInt8Array, int]
"""uint8 [H, W], label"""

BUFFER_BATCHES = 16
OTHER_BUFFERS = (8, 32, 64)  # before augmentation, at e = 4
# With the smallest N(4) of the buffers tried, and so tried again with seeds that had no part in the choice.
CONFIRMED_BUFFER = 32
CONFIRMING_SEEDS = range(100, 105)
EVALUATE_EVERY = 20
NUM_TEST = 5000  # of 10,000: evaluations take a fifth of the time
MAX_UPDATES = 8000
RUNS = Path(__file__).parent / "results/fresh_examples_runs.jsonl"

FACTORS = (1, 2, 4, 8)
TITLES = {
    "before": "examples, before augmentation",
    "after": "examples, after augmentation",
    "batch": "batch echoing",
}
BAR = 1.15  # of the ideal, before augmentation
BAR_FACTORS = (2, 4)

PAPER = {
    "CIFAR-10": {("batch", 2): 0.848, ("after", 2): 0.658, ("before", 2): 0.576},
    "ImageNet": {("batch", 2): 1.05, ("after", 2): 0.824, ("before", 2): 0.515},
    "ImageNet from cloud storage": {
        ("before", 2): 0.526,
        ("before", 3): 0.367,
        ("before", 4): 0.269,
        ("before", 5): 0.243,
    },
}
"""The paper's N(e) / N(1), with ResNet-32 and ResNet-50; from cloud storage R is near 6."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What decides a run, and so what it is known by."""

    variant: str
    factor: int
    seed: int
    target: float
    """Test accuracy, in percent."""
    buffer_batches: int = BUFFER_BATCHES
    batch_size: int = BATCH_SIZE
    evaluate_every: int = EVALUATE_EVERY
    num_test: int = NUM_TEST


@dataclass(frozen=True, slots=True)
class Run:
    """How one run went."""

    condition: Condition
    reached: bool
    fresh_examples: int
    """Read by the update at which the target was reached."""
    updates: int
    accuracy: float
    resident_examples: int
    """The part of `fresh_examples` that had uses left."""
    seconds: float


class Augment:
    """The demonstration's `Augment`, for one example: a shift by up to two pixels each way, a mirroring or none.

    Its generator is its own, since batch echoing reads in a thread.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, example: Example) -> Example:
        image, label = example
        height, width = image.shape
        padded = np.zeros((height + 2 * SHIFT, width + 2 * SHIFT), np.uint8)
        padded[SHIFT:-SHIFT, SHIFT:-SHIFT] = image
        dy, dx = self._random.choices(range(2 * SHIFT + 1), k=2)
        moved = padded[dy : dy + height, dx : dx + width]
        return (moved[:, ::-1] if self._random.random() < 0.5 else moved), label


class Images(Dataset[Example]):
    """Examples, augmented in `__getitem__` if there is an `augment`."""

    def __init__(self, images: UInt8Array, labels: UInt8Array, augment: Augment | None = None) -> None:
        self._images = images
        self._labels = labels.tolist()
        self._augment = augment

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Example:
        example = self._images[index], self._labels[index]
        return example if self._augment is None else self._augment(example)


def collate(examples: Sequence[Example]) -> Batch:
    """Stack to (uint8 [B, 1, H, W], int64 [B])."""
    images, labels = zip(*examples, strict=True)
    return torch.from_numpy(np.stack(images)).unsqueeze(1), torch.tensor(labels)


def make_loader(condition: Condition, data: FashionMNIST) -> tuple[Any, int]:
    """The loader of a condition, and how many examples its `stats()` count as one item."""
    factor, size, seed = condition.factor, condition.batch_size, condition.seed
    options: dict[str, Any] = {"batch_size": size, "shuffle": True, "drop_last": True, "collate_fn": collate}
    augment = Augment(seed)
    plain = Images(data.train_images, data.train_labels)
    augmented = Images(data.train_images, data.train_labels, augment)
    if condition.variant == "batch":
        loader: DataLoader[Any] = DataLoader(augmented, **options)
        return stretto.echo(loader, factor, unit="batch", buffer=condition.buffer_batches, seed=seed), size
    options |= {"factor": factor, "buffer": condition.buffer_batches * size, "seed": seed}
    if condition.variant == "after":
        return stretto.EchoDataLoader(augmented, **options), 1
    return stretto.EchoDataLoader(plain, **options, augment=augment), 1


def endless(loader: Any) -> Iterator[Batch]:
    """Batches of epoch after epoch."""
    while True:
        yield from loader


def run(condition: Condition, data: FashionMNIST) -> Run:
    """Train from the seed's initial weights to the target."""
    began = time.perf_counter()
    torch.manual_seed(condition.seed)
    test_images = torch.from_numpy(data.test_images[: condition.num_test]).unsqueeze(1)
    test_labels = torch.from_numpy(data.test_labels[: condition.num_test].astype(np.int64))
    trainer = Trainer(condition.seed)
    loader, examples_per_item = make_loader(condition, data)
    updates, accuracy = 0, 0.0
    for batch in endless(loader):
        trainer.step(batch)
        updates += 1
        if updates % condition.evaluate_every == 0:
            accuracy = trainer.accuracy(test_images, test_labels)
            if accuracy >= condition.target or updates >= MAX_UPDATES:
                break
    stats = loader.stats()
    if isinstance(loader, stretto.EchoLoader):
        loader.close()
    return Run(
        condition=condition,
        reached=accuracy >= condition.target,
        fresh_examples=stats.fresh_items * examples_per_item,
        updates=updates,
        accuracy=accuracy,
        resident_examples=stats.resident_items * examples_per_item,
        seconds=round(time.perf_counter() - began, 1),
    )


def read_runs(path: Path = RUNS) -> list[Run]:
    """The runs in a file of lines; a last line that was cut off is removed from it."""
    if not path.exists():
        return []
    content = path.read_bytes()
    if (whole := content.rfind(b"\n") + 1) < len(content):
        os.truncate(path, whole)
    lines = [json.loads(line) for line in content[:whole].splitlines()]
    return [Run(**{**line, "condition": Condition(**line["condition"])}) for line in lines]


def select(runs: Sequence[Run], variant: str, factor: int, buffer_batches: int = BUFFER_BATCHES) -> list[Run]:
    """The runs of one variant and factor, by seed."""
    wanted = (variant, factor, buffer_batches)
    found = [r for r in runs if (r.condition.variant, r.condition.factor, r.condition.buffer_batches) == wanted]
    return sorted(found, key=lambda r: r.condition.seed)


def ratios(runs: Sequence[Run], variant: str, factor: int, buffer_batches: int = BUFFER_BATCHES) -> list[float]:
    """N(e) / N(1) of each seed; none if a run missed the target.

    Without echo the variants are one, but for the random numbers: N(1) is the median of the seed's three runs.
    """
    of_seeds = select(runs, variant, factor, buffer_batches)
    plain = [r for r in runs if r.condition.factor == 1]
    without = [[r for r in plain if r.condition.seed == of.condition.seed] for of in of_seeds]
    if not all(r.reached for r in chain(of_seeds, *without)):
        return []
    base = [statistics.median(r.fresh_examples for r in same_seed) for same_seed in without]
    return [r.fresh_examples / n for r, n in zip(of_seeds, base, strict=True)]


def table(runs: Sequence[Run], buffer_batches: int = BUFFER_BATCHES) -> str:
    """A table in Markdown: medians over the seeds, with the lowest and the highest seed's ratio.

    Factors that only the paper has are rows too.
    """
    runs = [r for r in runs if r.condition.buffer_batches == buffer_batches]
    lines = [
        "| echo point | e | fresh examples | updates | N(e) / N(1) (lowest .. highest seed) | ideal | "
        + " | ".join(f"paper, {workload}" for workload in PAPER)
        + " |",
        "|---|---:|---:|---:|---:|---:|" + "---:|" * len(PAPER),
    ]
    rows = {(r.condition.variant, r.condition.factor) for r in runs}
    if buffer_batches == BUFFER_BATCHES:
        rows = rows.union(*PAPER.values())
    for variant, factor in sorted(rows, key=lambda row: (list(TITLES).index(row[0]), row[1])):
        cells = [TITLES[variant], str(factor), "", "", "", f"{1 / factor:.3g}"]
        if of_seeds := select(runs, variant, factor, buffer_batches):
            cells[2] = f"{statistics.median(r.fresh_examples for r in of_seeds):,.0f}"
            cells[3] = f"{statistics.median(r.updates for r in of_seeds):,.0f}"
            cells[4] = "1" if factor == 1 else _ratio_cell(ratios(runs, variant, factor, buffer_batches))
        cells += [str(paper.get((variant, factor), "")) for paper in PAPER.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(runs: Sequence[Run]) -> str:
    """The study, and what new seeds say with the buffer that it found best."""
    confirming = [r for r in runs if r.condition.seed in CONFIRMING_SEEDS]
    if not confirming:
        return table(runs)
    return (
        f"{table(runs)}\n\nThe same with a buffer of {CONFIRMED_BUFFER} batches, the best of those tried at e = 4, "
        f"and {len(CONFIRMING_SEEDS)} new seeds:\n\n{table(confirming, CONFIRMED_BUFFER)}"
    )


def _ratio_cell(values: Sequence[float]) -> str:
    if not values:
        return "target missed"
    return f"**{statistics.median(values):.3f}** ({min(values):.3f} .. {max(values):.3f})"


def made_up_data(num_train: int = 4000, num_test: int = 500) -> FashionMNIST:
    """Ten blurred patterns under noise, for --quick."""
    rng = np.random.default_rng(0)
    patterns = np.kron(rng.integers(0, 256, (10, 7, 7)), np.ones((4, 4)))

    def draw(count: int) -> tuple[UInt8Array, UInt8Array]:
        labels = rng.integers(0, 10, count).astype(np.uint8)
        noisy = patterns[labels] + rng.normal(0, 60, (count, 28, 28))
        return noisy.clip(0, 255).astype(np.uint8), labels

    return FashionMNIST(*draw(num_train), *draw(num_test))


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=3)
    report = Report("fresh_examples", arguments)
    torch.set_num_threads(1)
    data = made_up_data() if arguments.quick else load_fashion_mnist()
    target = 60.0 if arguments.quick else 85.0
    wanted = [
        Condition(variant, factor, seed, target)
        for seed in range(arguments.rounds)
        for variant in TITLES
        for factor in (FACTORS if not arguments.quick else (1, 2))
    ]
    if not arguments.quick:
        seeds = range(arguments.rounds)
        wanted += [Condition("before", 4, seed, target, buffer) for buffer in OTHER_BUFFERS for seed in seeds]
        wanted += [
            Condition(variant, factor, seed, target, CONFIRMED_BUFFER)
            for seed in CONFIRMING_SEEDS
            for variant, factor in [*((variant, 1) for variant in TITLES), *(("before", e) for e in BAR_FACTORS)]
        ]
    path = RUNS if arguments.out is None else arguments.out.with_name(f"{arguments.out.stem}_runs.jsonl")
    finished = {} if arguments.quick else {r.condition: r for r in read_runs(path)}
    for condition in wanted:
        if condition in finished:
            continue
        finished[condition] = done = run(condition, data)
        if not arguments.quick:
            with path.open("a") as file:
                file.write(json.dumps(asdict(done)) + "\n")
        report.note(
            f"seed {condition.seed}, {TITLES[condition.variant]}, e = {condition.factor}, "
            f"{condition.buffer_batches} batches: {done.accuracy:.1f} % with {done.fresh_examples:,} fresh "
            f"examples, {done.updates:,} updates, {done.seconds:.0f} s"
        )
    runs = [finished[condition] for condition in wanted]
    for variant, title in TITLES.items():
        for factor in FACTORS:
            of_seeds = select(runs, variant, factor)
            if not of_seeds:
                continue
            name = f"{title}, e = {factor}"
            report.add(f"{name}, N", Spread.of([r.fresh_examples for r in of_seeds]), "examples")
            if factor == 1:
                continue
            values = ratios(runs, variant, factor)
            if not values:
                report.note(f"{name}: the target was missed")
                continue
            bar = BAR / factor if variant == "before" and factor in BAR_FACTORS else None
            report.add(f"{name}, N(e) / N(1)", Spread.of(values), "", at_most=bar)
    report.note(f"buffer: {BUFFER_BATCHES} batches of {BATCH_SIZE}")
    for buffer in OTHER_BUFFERS:
        if values := ratios([r for r in runs if r.condition.seed not in CONFIRMING_SEEDS], "before", 4, buffer):
            report.add(f"{TITLES['before']}, e = 4, {buffer} batches", Spread.of(values), "")
    for factor in BAR_FACTORS:
        confirming = [r for r in runs if r.condition.seed in CONFIRMING_SEEDS]
        if values := ratios(confirming, "before", factor, CONFIRMED_BUFFER):
            name = f"{TITLES['before']}, e = {factor}, {CONFIRMED_BUFFER} batches, new seeds, N(e) / N(1)"
            report.add(name, Spread.of(values), "", at_most=BAR / factor)
    report.finish()
    print(tables(runs))
    if not arguments.quick and arguments.out is None:
        write_table("docs/where.md", "fresh_examples", tables(runs))


if __name__ == "__main__":
    main()
