"""One run of `accuracy.py`: what decides it, how it is trained, and the file where it is kept."""

import json
import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy_data import Data, load
from accuracy_models import make_auxiliaries, make_blocks
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stretto.pipelining import Repairs, Simulation, Staleness, simulate
from stretto.pipelining.peers import GreedyTraining, SyntheticGradients

BATCH_SIZES = {"fashion": 64, "fashion-full": 64, "digits": 32, "text": 16, "made-up": 32}
EVALUATION_BATCH = 250
DNI_NETWORK_RATE = 1e-3
"""Adam's rate for the networks that predict gradients, at the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What decides a run, and so what it is known by."""

    workload: str
    learner: str = "stale"
    """Or "dgl", "dni"."""
    staleness: str
    """As `Staleness` prints it: K, m, and whether the backward uses stashed weights."""
    accumulate: int = 1
    """Micro-batches that a batch is cut into."""
    optimizer: str
    weight_decay: float
    lr: float
    predict: bool = False
    discount: float = 0.0
    """Fading over the first quarter of the updates."""
    warmup: bool = False
    """Over the first tenth of the updates."""
    updates: int
    seed: int
    split: str
    """Evaluated on: "held-out" or "test"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one run went."""

    condition: Condition
    score: float
    """Correct of the evaluation examples, in percent; for text the perplexity of a character."""
    seconds: float


def run(condition: Condition) -> Run:
    """Train from the seed's weights, on the seed's batches, and evaluate once at the end."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    data = load(condition.workload, condition.split)
    trainer = make_trainer(condition)
    for x, y in batches(condition, data):
        loss = trainer.step(x, target=y)
        if not math.isfinite(loss):
            break
    trainer.flush()
    return Run(
        condition=condition, score=evaluate(condition, trainer, data), seconds=round(time.perf_counter() - began, 1)
    )


def make_trainer(condition: Condition) -> Simulation:
    """The split network with its optimizers."""
    spec = Staleness.parse(condition.staleness)
    torch.manual_seed(condition.seed)
    blocks = make_blocks(condition.workload, spec.K)
    optimizers = [make_optimizer(condition, block) for block in blocks]
    rise = condition.updates // 10 if condition.workload == "text" else 0  # as is usual for a Transformer
    schedulers = [cosine(optimizer, condition.updates, rise) for optimizer in optimizers]
    if condition.learner == "stale":
        repairs = Repairs(
            predict=condition.predict,
            discount=condition.discount,
            discount_updates=condition.updates // 4 if condition.discount else None,
            warmup=condition.updates // 10 if condition.warmup else 0,
        )
        with warnings.catch_warnings():
            # That momentum without Nesterov suffers more is one of the questions here.
            warnings.filterwarnings("ignore", message="a block with m > 0 trains with SGD and momentum")
            return simulate(
                blocks,
                optimizers,
                mean_loss,
                m=spec,
                accumulate=condition.accumulate,
                lr_scheduler=schedulers,
                repairs=repairs,
                seed=condition.seed,
            )
    auxiliaries = make_auxiliaries(condition.learner, condition.workload, blocks)
    if condition.learner == "dgl":
        auxiliary_optimizers = [make_optimizer(condition, head) for head in auxiliaries]
    else:
        auxiliary_optimizers = [Adam(network.parameters(), DNI_NETWORK_RATE) for network in auxiliaries]
    kind = GreedyTraining if condition.learner == "dgl" else SyntheticGradients
    return kind(
        blocks,
        auxiliaries,
        optimizers,
        auxiliary_optimizers,
        mean_loss,
        lr_scheduler=schedulers,
        auxiliary_lr_scheduler=[cosine(optimizer, condition.updates, rise) for optimizer in auxiliary_optimizers],
        seed=condition.seed,
    )


def make_optimizer(condition: Condition, module: nn.Module) -> Optimizer:
    """As the condition names it; momentum .9 with SGD, torch's own values otherwise."""
    parameters, lr, decay = module.parameters(), condition.lr, condition.weight_decay
    if condition.optimizer in ("sgd", "nesterov"):
        return SGD(parameters, lr, momentum=0.9, nesterov=condition.optimizer == "nesterov", weight_decay=decay)
    if condition.optimizer == "nadam":
        return NAdam(parameters, lr, weight_decay=decay, decoupled_weight_decay=True)
    return AdamW(parameters, lr, weight_decay=decay)


def cosine(optimizer: Optimizer, updates: int, rise: int) -> LambdaLR:
    """The rate falls to 0 along half a cosine, after it has risen for the first `rise` updates."""

    def factor(update: int) -> float:
        return min(1.0, (update + 1) / (rise + 1)) * 0.5 * (1 + math.cos(math.pi * min(1.0, update / updates)))

    return LambdaLR(optimizer, factor)


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all labels, or over all characters of all rows."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def batches(condition: Condition, data: Data) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches: the batches of shuffled epochs, the last short one left out, each in `accumulate` parts."""
    generator = torch.Generator().manual_seed(condition.seed)
    size = BATCH_SIZES[condition.workload]
    left = condition.updates
    while True:
        order = torch.randperm(len(data.x), generator=generator)
        for rows in order[: len(order) // size * size].view(-1, size):
            if not left:
                return
            left -= 1
            for part in rows.chunk(condition.accumulate):
                yield data.x[part], data.y[part]


def evaluate(condition: Condition, trainer: Simulation, data: Data) -> float:
    """The score on all evaluation examples."""
    total, count = 0.0, 0
    for x, y in zip(
        data.evaluation_x.split(EVALUATION_BATCH), data.evaluation_y.split(EVALUATION_BATCH), strict=True
    ):
        output = trainer.eval(x)
        if condition.workload == "text":
            total += float(mean_loss(output, y)) * y.numel()
        else:
            total += float((output.argmax(1) == y).sum())
        count += y.numel()
    if condition.workload != "text":
        return 100 * total / count
    # A run that diverged has learned nothing; JSON has no infinity.
    mean = total / count
    return math.exp(min(mean, 20.0)) if math.isfinite(mean) else math.exp(20.0)


class Store:
    """Finished runs, one line each in a file per workload; `folder` None keeps them in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.runs: dict[Condition, Run] = {}
        for path in sorted(folder.glob("*.jsonl")) if folder else []:
            self._read(path)

    def add(self, finished: Run) -> None:
        """Keep a run."""
        self.runs[finished.condition] = finished
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"{finished.condition.workload}.jsonl").open("a") as file:
                file.write(json.dumps(asdict(finished)) + "\n")

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        # A kill may have cut the last line off.
        if (whole := content.rfind(b"\n") + 1) < len(content):
            os.truncate(path, whole)
        for line in content[:whole].splitlines():
            fields: dict[str, Any] = json.loads(line)
            condition = Condition(**fields.pop("condition"))
            self.runs[condition] = Run(condition=condition, **fields)
