"""Bad input is one clear error, in every process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional

from stretto.pipelining import Repairs, ScheduleDSP, Staleness, simulate
from stretto.pipelining.names import keep_names
from tests.pipelining.processes import Pool
from tests.pipelining.training import Run, falling, rows, sgd, train

Made = dict[str, Any]
"""The arguments of a schedule."""


def usual(rank: int, world: int) -> Made:
    block = nn.Linear(*[(6, 8), (8, 8), (8, 4)][rank])
    return {
        "stage": (block, rank, world),
        "optimizer": sgd(block.parameters()),
        "loss_fn": functional.cross_entropy,
    }


# What one process, or all of them, give to ScheduleDSP


def with_options(rank: int, world: int, **options: Any) -> Made:
    return usual(rank, world) | options


def only_on(where: int, make: Callable[[Made], Made], rank: int, world: int) -> Made:
    made = usual(rank, world)
    return made | make(made) if rank == where else made


def another_index(made: Made) -> Made:
    return {"stage": (made["stage"][0], 0, 3)}


def no_optimizer(made: Made) -> Made:
    return {"optimizer": None}


def foreign_optimizer(made: Made) -> Made:
    return {"optimizer": sgd(nn.Linear(2, 3).parameters())}


def foreign_scheduler(made: Made) -> Made:
    return {"lr_scheduler": falling(sgd(nn.Linear(2, 3).parameters()))}


def another_seed(made: Made) -> Made:
    return {"seed": 1}


def another_m(made: Made) -> Made:
    return {"m": (3, 2, 0)}


def no_stage(made: Made) -> Made:
    return {"stage": made["stage"][0]}


def no_module(made: Made) -> Made:
    return {"stage": (torch.relu, 2, 3)}


def same_name(rank: int, world: int) -> Made:
    made = usual(rank, world)
    keep_names(made["stage"][0])
    return made


def impossible_stage(rank: int, world: int) -> Made:
    made = usual(rank, world)
    stage = PipelineStage(made["stage"][0], rank, world, torch.device("cpu"))
    stage.stage_index = rank + 3
    return made | {"stage": stage}


def another_world(rank: int, world: int) -> Made:
    made = usual(rank, world)
    return made | {"stage": (made["stage"][0], rank, 4)}


def another_mesh(rank: int, world: int) -> Made:
    made = usual(rank, world)
    return made | {"stage": (made["stage"][0], 0, 2), "mesh": init_device_mesh("cpu", (3, 1))}


def mesh_and_group(rank: int, world: int) -> Made:
    return usual(rank, world) | {"mesh": init_device_mesh("cpu", (3, 1)), "group": dist.group.WORLD}


def construct(rank: int, world: int, make: Callable[[int, int], Made]) -> None:
    ScheduleDSP(**make(rank, world))


CONSTRUCTED = {
    "m rises": (partial(with_options, m=(1, 2, 0)), "m_0=1, m_1=2 and p_0=0: m_0 - m_1 = -1"),
    "p above m": (partial(with_options, p=(2, 0, 0), m=(2, 1, 0)), "m_0=2, m_1=1 and p_0=2: m_0 - m_1 = 1"),
    "last m": (partial(with_options, m=(3, 2, 1)), "m_2=1 and p_2=0: the last block has nothing behind it"),
    "last p": (partial(with_options, p=(1, 1, 1), m=(2, 1, 0)), "m_2=0 and p_2=1: the last block"),
    "m of another K": (partial(with_options, m=(1, 0)), "m=(1, 0) has 2 values, the model has 3 blocks"),
    "a Staleness of another K": (partial(with_options, m=Staleness.dsp(2)), "is for 2 blocks, the model has 3"),
    "backward_params": (partial(with_options, backward_params="old"), "backward_params='old': expected"),
    "accumulate": (partial(with_options, accumulate=0), "accumulate=0: expected a number of micro-batches from 1"),
    "clip": (partial(with_options, clip=-1.0), "clip=-1.0: expected a norm above 0"),
    "float16": (partial(with_options, autocast=torch.float16), "autocast to torch.float16 needs a scaled loss"),
    "loss_fn": (partial(with_options, loss_fn=3), "loss_fn=3: expected a function"),
    "world": (another_world, "3 processes for 4 stages: expected one process a stage. For R replicas"),
    "mesh": (another_mesh, "mesh of shape (3, 1): expected (2 stages, replicas)"),
    "mesh and group": (mesh_and_group, "group and mesh are both given"),
    "names": (same_name, "'weight' is a name in block 0 and in block 1"),
    "impossible stage": (impossible_stage, "of 3: expected 0 <= index < number of stages"),
    "index": (partial(only_on, 1, another_index), "stage 0 on process 1 of the pipeline (ranks (0, 1, 2))"),
    "no stage": (partial(only_on, 0, no_stage), "expected a PipelineStage or a tuple (module, index, num_stages)"),
    "no module": (partial(only_on, 2, no_module), "the stage's module is a builtin_function_or_method"),
    "no optimizer": (partial(only_on, 1, no_optimizer), "block 1 has parameters to train and no optimizer"),
    "optimizer": (partial(only_on, 1, foreign_optimizer), "the optimizer of block 1 holds 2 of 2 parameters that"),
    "scheduler": (partial(only_on, 2, foreign_scheduler), "the lr_scheduler of block 2 belongs to another"),
    "seed": (partial(only_on, 2, another_seed), "seed="),
    "m": (partial(only_on, 1, another_m), "staleness='DSP("),
}


@pytest.mark.parametrize(("make", "message"), CONSTRUCTED.values(), ids=CONSTRUCTED.keys())
def test_every_process_refuses_what_one_cannot_do(pool: Pool, make: Callable[..., Made], message: str) -> None:
    for error in pool.outcomes(construct, 3, make):
        assert isinstance(error, TypeError | ValueError)
        assert message in str(error)


# What is noticed while training


class Sparse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().to_sparse()


class Forgetting(nn.Module):
    """Gives another structure in the recompute."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.num_calls += 1
        return x if self.num_calls < 3 else (x, x)


class Rarely(nn.Module):
    """Writes to its input, but not the first time."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x.add_(1) if self.num_calls > 1 else x + 1


def step_on(rank: int, world: int, blocks: Callable[[], list[nn.Module]], loss_fn: Any, batches: Any) -> None:
    block = blocks()[rank]
    parameters = list(block.parameters())
    schedule = ScheduleDSP((block, rank, world), sgd(parameters) if parameters else None, loss_fn)
    train(Run(epochs=[batches]), schedule, reads=rank == 0)


def linear(middle: nn.Module) -> list[nn.Module]:
    return [nn.Linear(6, 8), middle, nn.Linear(8, 4)]


def loss_of_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target, reduction="none")


USUAL = partial(linear, nn.Tanh())
CROSS = functional.cross_entropy
WITHOUT_TARGET = [(x, None) for x, _ in rows(3)]
TRAINED: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "output of another width": (
        partial(linear, nn.Linear(9, 8)),
        CROSS,
        rows(3),
        ["in block 1 of 3, batch 0, whose input was [4, 8] torch.float32", "mat1 and mat2 shapes cannot be multi"],
    ),
    "no target": (USUAL, CROSS, WITHOUT_TARGET, ["target=None, but loss_fn=", "call step(x, target=y) on block 0"]),
    "a triple": (USUAL, CROSS, [(1, 2, 3)], ["the loader gave a tuple of 3: expected pairs (x, target)"]),
    "no loader": (USUAL, CROSS, None, ["feed(None) on block 0: expected the loader"]),
    "no batch": (USUAL, CROSS, [None], ["step(None) on block 0: expected the batch"]),
    "loss of rows": (
        USUAL,
        loss_of_rows,
        rows(3),
        ["gave a tensor of shape (4,) as the loss"],
    ),
    "no loss": (USUAL, None, rows(3), ["the last block (loss_fn=None) gave a tensor of shape (4, 4) as the loss"]),
    "sparse": (
        partial(linear, Sparse()),
        CROSS,
        rows(3),
        ["the tensor at [0] of what passes between"],
    ),
    "recompute": (
        partial(linear, Forgetting()),
        CROSS,
        rows(6),
        ["had 1 leaves at first and has 2 in the recompute: its structure must depend on the input alone"],
    ),
    "sometimes in place": (
        partial(linear, Rarely()),
        CROSS,
        rows(6),
        ["the block wrote to its input"],
    ),
}


@pytest.mark.parametrize(("blocks", "loss_fn", "batches", "messages"), TRAINED.values(), ids=TRAINED.keys())
def test_every_process_raises_what_one_finds(
    pool: Pool, blocks: Any, loss_fn: Any, batches: Any, messages: list[str]
) -> None:
    for error in pool.outcomes(step_on, 3, blocks, loss_fn, batches):
        assert isinstance(error, Exception)
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert all(message in text for message in messages), text


def another_loop(rank: int, world: int) -> None:
    made = usual(rank, world)
    schedule = ScheduleDSP(**made)
    with schedule:
        for x, y in schedule.feed(rows(3)):
            if rank == 1:
                schedule.eval(x)
            schedule.step(x, target=y)
        schedule.flush()


def test_every_process_hears_that_one_runs_another_loop(pool: Pool) -> None:
    for error in pool.outcomes(another_loop, 3):
        assert "all ranks must run the same loop of feed, step, eval and flush" in str(error)


# One process


def test_several_stages_need_processes() -> None:
    with pytest.raises(ValueError, match=r"3 stages, but torch\.distributed is not initialised"):
        ScheduleDSP(**usual(0, 3))


def test_the_simulator_refuses_tied_weights() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    with pytest.raises(ValueError, match=r"the parameter '1\.weight' of block 1 is '0\.weight' of block 0"):
        simulate([first, last], [sgd(first.parameters()), sgd(last.parameters())])


@pytest.mark.parametrize("name", ["optimizers", "lr_scheduler"])
def test_the_simulator_wants_one_of_each_for_every_block(name: str) -> None:
    blocks = Run().make_blocks(2)
    given: dict[str, Any] = {"optimizers": [sgd(block.parameters()) for block in blocks]} | {name: [None]}
    with pytest.raises(ValueError, match=rf"1 {name} for 2 blocks: expected one for each"):
        simulate(blocks, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": -1}, "discount=-1: expected an exponent from 0"),
        ({"discount_updates": 3}, "discount_updates=3 with discount=0.0"),
        ({"warmup": -1}, "warmup=-1: expected a number of updates"),
    ],
)
def test_repairs_refuse_what_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Repairs(**options)


def test_weights_are_not_predicted_without_a_momentum() -> None:
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in blocks]
    with pytest.raises(ValueError, match="predict=True with SGD: weights are predicted from the momentum"):
        simulate(blocks, optimizers, repairs=Repairs(predict=True))


def test_plain_momentum_is_advised_against() -> None:
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9) for block in blocks]
    with pytest.warns(UserWarning, match="nesterov=True tolerates staleness better"):
        simulate(blocks, optimizers)
