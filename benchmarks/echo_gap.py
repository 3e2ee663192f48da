"""What `stats().echo_gap` says where echoing helps, and where the model learns the buffer by heart.

Two of the study's workloads, with the losses of each batch given to `loader.observe` after its update: the small
ResNet on Fashion-MNIST and the Transformer on WordNet's definitions, at one learning rate each, near the middle of
the study's range, that falls to a tenth over the run. All conditions make equally many updates.

A condition is judged by the run without echo: how many fresh examples that one had read when it was first as good.
This over the condition's own fresh examples is what echoing was worth: e in the ideal, 1 where it gained nothing.
Only counts matter, so it may run beside other work. --quick has made-up data.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Spread, parse_arguments
from torch import Tensor, nn
from workloads import language_model, resnet_fashion, text_wordnet
from workloads.classifier import Normalise, make_model
from workloads.common import Rows, fresh_batches, percent_right
from workloads.corpora import Text

import stretto

NUM_UPDATES = 600
EVALUATE_EVERY = 25
SMOOTH = 3
"""Evaluations averaged to one: neighbours differ by more than the training gains between them."""


@dataclass(frozen=True, slots=True)
class Condition:
    variant: str
    """batch, after or before; none for no echo."""
    factor: int = 1
    buffer_batches: int = 1

    @property
    def title(self) -> str:
        if self.variant == "none":
            return "no echo"
        names = {"batch": "batches", "after": "examples", "before": "examples, before augmentation"}
        plural = "es" if self.buffer_batches > 1 else ""
        return f"{names[self.variant]}, e = {self.factor}, buffer of {self.buffer_batches} batch{plural}"


@dataclass(slots=True)
class Job:
    """A model in training: `losses(batch)` [B] before the update, and `evaluate()`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: Callable[[Any], Tensor]
    evaluate: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Workload:
    title: str
    metric: str
    sign: int
    """1 if a higher metric is better, else -1."""
    batch_size: int
    lr: float
    warm_up: int
    data: Callable[[], Any]
    made_up: Callable[[], Any]
    """The same in little, made up: for --quick."""
    rows: Callable[[Any], Rows]
    job: Callable[[Any, float], Job]
    augment: Callable[[Any, torch.Generator], Any] | None
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Run:
    gap: float | None
    warned_at: int | None
    """The update after which the warning came."""
    fresh_examples: int
    curve: list[tuple[int, float]]
    """Fresh examples and metric, of each evaluation."""

    @property
    def metric(self) -> float:
        last = [metric for _, metric in self.curve[-SMOOTH:]]
        return sum(last) / len(last)


def images_job(data: resnet_fashion.Data, lr: float) -> Job:
    model = make_model(Normalise(73, 90), nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr, 0.9, weight_decay=5e-4, nesterov=True)

    def losses(batch: resnet_fashion.Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="none")

    return Job(model, optimizer, losses, lambda: percent_right(model, data.test_images, data.test_labels))


def text_job(data: Text, lr: float) -> Job:
    model = language_model.make_model(text_wordnet.LENGTH, text_wordnet.WIDTH, text_wordnet.NUM_LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)

    def losses(batch: tuple[Tensor]) -> Tensor:
        rows = batch[0].long()
        return F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none").mean(1)

    return Job(model, optimizer, losses, lambda: language_model.cross_entropy(model, data.test).item())


def made_up_images() -> resnet_fashion.Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (320, 1, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (320,), generator=generator)
    return resnet_fashion.Data(images, labels, images[:32], labels[:32])


def made_up_text() -> Text:
    rows = torch.randint(97, 123, (192, text_wordnet.LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Text(rows.to(torch.uint8), rows[:16].to(torch.uint8))


USUAL = (
    Condition("none"),
    Condition("after", 2, 16),
    Condition("batch", 4, 16),
    Condition("after", 4, 16),
)
IMAGES = Workload(
    title="ResNet on Fashion-MNIST",
    metric="test accuracy, %",
    sign=1,
    batch_size=64,
    lr=0.055,
    warm_up=0,
    data=resnet_fashion.load_data,
    made_up=made_up_images,
    rows=lambda data: Rows(data.images, data.labels),
    job=images_job,
    augment=resnet_fashion.augment,
    conditions=(
        *USUAL,
        Condition("before", 4, 16),
        Condition("after", 16, 4),
        Condition("before", 64, 2),
    ),
)
TEXT = Workload(
    title="Transformer on WordNet",
    metric="test cross-entropy, nats",
    sign=-1,
    batch_size=32,
    lr=0.005,
    warm_up=language_model.WARM_UP,
    data=text_wordnet.load_data,
    made_up=made_up_text,
    rows=lambda data: Rows(data.train),
    job=text_job,
    augment=None,
    conditions=(
        *USUAL,
        Condition("after", 16, 16),
        Condition("after", 16, 4),
        Condition("after", 64, 2),
    ),
)


def batches_of(workload: Workload, data: Any, condition: Condition, seed: int) -> tuple[Any, Iterator[Any]]:
    """The EchoLoader of a condition, and its batches without end."""
    generator = torch.Generator().manual_seed(seed)
    augment = workload.augment
    fresh: Any = fresh_batches(workload.rows(data), workload.batch_size)
    behind = None
    if augment is not None and condition.variant == "before":
        behind = lambda batch: augment(batch, generator)  # noqa: E731
    elif augment is not None:
        fresh = Augmented(fresh, lambda batch: augment(batch, generator))
    is_whole = condition.variant in ("none", "batch")
    loader = stretto.echo(
        fresh,
        condition.factor,
        unit="batch" if is_whole else "example",
        buffer=condition.buffer_batches * (1 if is_whole else workload.batch_size),
        augment=behind,
        seed=seed,
    )
    return loader, itertools.chain.from_iterable(itertools.repeat(loader))


class Augmented:
    """A loader whose batches are augmented as they are read."""

    def __init__(self, loader: Any, augment: Callable[[Any], Any]) -> None:
        self.base_dataloader = loader  # by this name stretto.echo finds what to seed
        self._augment = augment

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._augment, self.base_dataloader)


def evaluate(job: Job) -> float:
    """The metric, in evaluation mode."""
    job.model.eval()
    with torch.inference_mode():
        return job.evaluate()


def run(workload: Workload, data: Any, condition: Condition, seed: int, num_updates: int) -> Run:
    """Train from the seed's initial weights."""
    torch.manual_seed(seed)
    job = workload.job(data, workload.lr)
    loader, batches = batches_of(workload, data, condition, seed)
    curve = [(0, evaluate(job))]
    warned_at = None
    with loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for update, batch in enumerate(itertools.islice(batches, num_updates), 1):
            job.model.train()
            rate = workload.lr * (1 - 0.9 * update / num_updates)
            for group in job.optimizer.param_groups:
                group["lr"] = rate * min(1, update / max(1, workload.warm_up))
            losses = job.losses(batch)
            job.optimizer.zero_grad(set_to_none=True)
            losses.mean().backward()
            job.optimizer.step()
            loader.observe(losses)
            if warned_at is None and any("echo_gap" in str(warning.message) for warning in caught):
                warned_at = update
            if update % EVALUATE_EVERY == 0 or update == num_updates:
                curve.append((loader.stats().fresh_batches * workload.batch_size, evaluate(job)))
        stats = loader.stats()
    return Run(stats.echo_gap, warned_at, stats.fresh_batches * workload.batch_size, curve)


def fresh_examples_for(metric: float, curve: list[tuple[int, float]], sign: int) -> float:
    """Fresh examples read when a curve, smoothed, first came to the metric; between evaluations on a straight line.

    All of them if it never did.
    """
    before, level = curve[0]
    for at, (fresh, _) in enumerate(curve):
        some = [value for _, value in curve[max(0, at - SMOOTH // 2) : at + SMOOTH // 2 + 1]] if at else [level]
        value = sum(some) / len(some)
        if sign * (value - metric) >= 0:
            return before + (fresh - before) * (metric - level) / (value - level or 1)
        before, level = fresh, value
    return float(before)


def measure(report: Report) -> None:
    seeds, quick = range(report.arguments.rounds), report.arguments.quick
    num_updates = 6 if quick else NUM_UPDATES
    for workload in (IMAGES, TEXT):
        data = workload.made_up() if quick else workload.data()
        runs = {one: [run(workload, data, one, seed, num_updates) for seed in seeds] for one in workload.conditions}
        for condition, of_seeds in runs.items():
            what = f"{workload.title}, {condition.title}"
            report.add(f"{what}: {workload.metric}", Spread.of([one.metric for one in of_seeds]), "")
            report.add(f"{what}: fresh examples", Spread.of([float(one.fresh_examples) for one in of_seeds]), "")
            if condition.variant == "none":
                continue
            worth = [
                fresh_examples_for(one.metric, plain.curve, workload.sign) / one.fresh_examples
                for one, plain in zip(of_seeds, runs[workload.conditions[0]], strict=True)
            ]
            report.add(f"{what}: worth", Spread.of(worth), "times")
            if gaps := [one.gap for one in of_seeds if one.gap is not None]:
                report.add(f"{what}: gap", Spread.of(gaps), "")
            warned = [float(one.warned_at) for one in of_seeds if one.warned_at is not None]
            if warned:
                report.add(f"{what}: warned after", Spread.of(warned), "updates")
            report.add(f"{what}: runs with a warning", Spread.of([float(len(warned))]), f"of {len(of_seeds)}")


def table(results: list[dict[str, Any]]) -> str:
    """One row a condition, from a record's results."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        what, _, name = result["what"].rpartition(": ")
        found.setdefault(what, {})[name] = result
    lines = []
    for workload in (IMAGES, TEXT):
        lines += [
            f"| {workload.title} | {workload.metric} | fresh examples | worth | gap | warned after |",
            "|---|---|---|---|---|---|",
        ]
        for condition in workload.conditions:
            row = found[f"{workload.title}, {condition.title}"]
            metric = f"{row[workload.metric]['median']:.{1 if workload.sign > 0 else 2}f}"
            cells = [condition.title, metric, f"{row['fresh examples']['median']:,.0f}"]
            if condition.variant == "none":
                cells += ["1", "", ""]
            else:
                warned = f"{row['warned after']['median']:.0f} updates" if "warned after" in row else "no"
                cells += [f"{row['worth']['median']:.1f}", f"{row['gap']['median']:.2f}", warned]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).strip()


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=1)
    report = Report("echo_gap", arguments)
    torch.set_num_threads(1)
    measure(report)
    report.finish("" if arguments.quick else table(report.results), "docs/echo.md")


if __name__ == "__main__":
    main()
