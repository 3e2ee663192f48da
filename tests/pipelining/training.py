"""Small models, their data, and one training run of them: plain, simulated, or over processes.

A `Run` says all of it by names and numbers, so that every process builds the same one.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stretto.pipelining import ScheduleDSP, Simulation, batch_rng, simulate

Data = list[tuple[Any, Any]]


def perceptron() -> list[nn.Module]:
    return [
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.Dropout(0.3),
        nn.BatchNorm1d(8),
        nn.Linear(8, 4),
    ]


def convolutions() -> list[nn.Module]:
    return [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(36, 4),
    ]


def rows(num_batches: int, last: int = 3) -> Data:
    """Batches of 4 examples, the last one of `last`."""
    made = torch.Generator().manual_seed(1)
    sizes = [4] * (num_batches - 1) + [last] * (num_batches > 0)
    return [(torch.randn(size, 6, generator=made), torch.randint(0, 4, (size,), generator=made)) for size in sizes]


def images(num_batches: int) -> Data:
    made = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(4, 2, 5, 5, generator=made).to(memory_format=torch.channels_last),
            torch.randint(0, 4, (4,), generator=made),
        )
        for _ in range(num_batches)
    ]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def nadam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=0.01)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


def cut(layers: Sequence[nn.Module], num_blocks: int) -> list[nn.Module]:
    """Blocks of nearly equal numbers of layers."""
    ends = [len(layers) * k // num_blocks for k in range(num_blocks + 1)]
    return [nn.Sequential(*layers[first:end]) for first, end in itertools.pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    layers: Callable[[], list[nn.Module]] = perceptron
    blocks: Callable[[], list[nn.Module]] | None = None
    """Makes the blocks themselves, where they are no cut of `layers`."""
    epochs: Sequence[Data] = field(default_factory=lambda: [rows(9)])
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    loss_fn: Callable[..., torch.Tensor] | None = functional.cross_entropy
    flush_between: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    delay_s: float = 0.0
    """Longest pause of a block before each pass."""

    def make_blocks(self, num_blocks: int) -> list[nn.Module]:
        torch.manual_seed(0)
        return cut(self.layers(), num_blocks) if self.blocks is None else self.blocks()

    def make_optimizer(self, block: nn.Module) -> torch.optim.Optimizer | None:
        trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        return self.optimizer(trained) if trained else None

    def make_scheduler(self, optimizer: torch.optim.Optimizer | None) -> Any:
        return None if optimizer is None or self.scheduler is None else self.scheduler(optimizer)


@dataclass(kw_only=True)
class Result:
    """What is left of a run."""

    state: list[dict[str, torch.Tensor]]
    """Of each block."""
    losses: list[torch.Tensor]
    num_updates: list[int]

    def check_is(self, other: "Result") -> None:
        """Every bit."""
        assert self.num_updates == other.num_updates
        assert len(self.losses) == len(other.losses)
        for mine, theirs in zip(self.losses, other.losses, strict=True):
            assert torch.equal(mine, theirs), (self.losses, other.losses)
        for block, (mine, theirs) in enumerate(zip(self.state, other.state, strict=True)):
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                assert torch.equal(value, theirs[name]), (block, name)
                assert value.is_floating_point() is False or value.isfinite().all(), (block, name)


def train(run: Run, schedule: Any, *, reads: bool) -> list[torch.Tensor]:
    """The loop that all ranks run; the losses where there are any."""
    losses = []
    for epoch in run.epochs:
        for x, y in schedule.feed(epoch if reads else None):
            losses.append(schedule.step(x, target=y))
        if run.flush_between:
            schedule.flush()
    schedule.flush()
    return losses


def simulation_of(run: Run, num_blocks: int = 3) -> Simulation:
    blocks = run.make_blocks(num_blocks)
    optimizers = [run.make_optimizer(block) for block in blocks]
    schedulers = [run.make_scheduler(optimizer) for optimizer in optimizers]
    return simulate(blocks, optimizers, run.loss_fn, lr_scheduler=schedulers, **run.options)


def schedule_of(rank: int, world: int, run: Run, **options: Any) -> ScheduleDSP:
    """That of block `rank`, with `options` in place of the run's."""
    block = run.make_blocks(world)[rank]
    if run.delay_s:
        pauses = random.Random(rank)
        block.register_forward_pre_hook(lambda *_: time.sleep(pauses.uniform(0, run.delay_s)))
    optimizer = run.make_optimizer(block)
    options = {"lr_scheduler": run.make_scheduler(optimizer)} | run.options | options
    return ScheduleDSP((block, rank, world), optimizer, run.loss_fn, **options)


def simulated(run: Run, num_blocks: int) -> Result:
    simulation = simulation_of(run, num_blocks)
    losses = train(run, simulation, reads=True)
    return Result(
        state=[block.module.state_dict() for block in simulation.blocks],
        losses=losses,
        num_updates=[block.num_updates for block in simulation.blocks],
    )


Part = tuple[dict[str, torch.Tensor], list[Any], int]
"""One process of a run: its block's weights, the losses and the number of updates."""


def part_of(schedule: ScheduleDSP, losses: list[Any]) -> Part:
    threads = [thread for thread in threading.enumerate() if "stretto" in thread.name]
    for thread in threads:
        thread.join(10)  # its last message may be read before it has ended
    assert not any(thread.is_alive() for thread in threads)
    return schedule.block.module.state_dict(), losses, schedule.block.num_updates


def part(rank: int, world: int, run: Run) -> Part:
    schedule = schedule_of(rank, world, run)
    losses = train(run, schedule, reads=rank == 0)
    assert all(loss is None for loss in losses) or rank == world - 1
    return part_of(schedule, losses)


def joined(parts: Sequence[Part]) -> Result:
    states, losses, updates = zip(*parts, strict=True)
    assert len({len(each) for each in losses}) == 1, "all ranks run through the loop as often"
    return Result(state=list(states), losses=losses[-1], num_updates=list(updates))


def plain(run: Run, num_blocks: int) -> Result:
    """The loop that everyone writes, with the random numbers of each batch set as a pipeline does."""
    blocks = run.make_blocks(num_blocks)
    optimizer = run.optimizer(nn.Sequential(*blocks).parameters())
    scheduler = run.make_scheduler(optimizer)
    every, dtype, clip = (run.options.get(name) for name in ("accumulate", "autocast", "clip"))
    losses = []
    for n, (x, y) in enumerate(batch for epoch in run.epochs for batch in epoch):
        with (
            batch_rng(run.options.get("seed", 0), n),
            torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
        ):
            for block in blocks:
                x = block(*x) if isinstance(x, tuple) else block(x)  # noqa: PLW2901
            loss = x if run.loss_fn is None else run.loss_fn(x, y)
        losses.append(loss.detach())
        (loss / (every or 1)).backward()
        if (n + 1) % (every or 1) == 0:
            if clip is not None:
                for block in blocks:
                    nn.utils.clip_grad_norm_(list(block.parameters()), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return Result(
        state=[block.state_dict() for block in blocks],
        losses=losses,
        num_updates=[len(losses) // (every or 1)] * num_blocks,
    )
