"""Data-parallel replicas of a split model: K x R processes."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from stretto.pipelining import ScheduleDSP, batch_rng
from tests.pipelining.processes import Pool
from tests.pipelining.training import Data, Result, Run, joined, part_of, rows, schedule_of, simulated, train

Part = tuple[dict[str, torch.Tensor], list[Any], int, list[str]]


def on_a_mesh(rank: int, world: int, run: Run, loaders: list[Data]) -> Part:
    """Process (k, r) of a mesh of 2 blocks and 2 replicas, whose block 0 reads loaders[r]."""
    stage, replica = divmod(rank, 2)
    block = run.make_blocks(2)[stage]
    if replica == 1:  # as with another seed
        for parameter in block.parameters():
            nn.init.constant_(parameter, 0.5)
    optimizer = run.make_optimizer(block)
    mesh = init_device_mesh("cpu", (2, 2))
    schedule = ScheduleDSP((block, stage, 2), optimizer, run.loss_fn, mesh=mesh, **run.options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = train(Run(epochs=[loaders[replica]]), schedule, reads=stage == 0)
    return block.state_dict(), losses, schedule.block.num_updates, [str(one.message) for one in told]


def column(parts: list[Part], replica: int) -> Result:
    """The results of one replica of the model."""
    states, losses, updates, _ = zip(*parts[replica::2], strict=True)
    return Result(state=list(states), losses=losses[-1], num_updates=list(updates))


def by_hand(run: Run, loaders: list[Data]) -> list[Result]:
    """Two copies of the model; what each batch's gradients are on average updates both."""
    copies = [run.make_blocks(2) for _ in range(2)]
    optimizers = [[run.make_optimizer(block) for block in blocks] for blocks in copies]
    losses: list[list[torch.Tensor]] = [[], []]
    num_batches, every = len(loaders[0]), run.options["accumulate"]
    for n in range(num_batches):
        for replica, blocks in enumerate(copies):
            x, y = loaders[replica][n]
            with batch_rng(0, 2 * n + replica):
                loss = functional.cross_entropy(nn.Sequential(*blocks)(x), y)
            losses[replica].append(loss.detach())
            (loss / every).backward()
        if (n + 1) % every != 0 and n + 1 < num_batches:
            continue
        for k in range(2):
            for mine, other in zip(*(blocks[k].parameters() for blocks in copies), strict=True):
                mine.grad = (mine.grad + other.grad) / 2
                other.grad = mine.grad.clone()
            for blocks, steppers in zip(copies, optimizers, strict=True):
                nn.utils.clip_grad_norm_(list(blocks[k].parameters()), run.options["clip"])
                steppers[k].step()
                steppers[k].zero_grad()
    updates = [-(-num_batches // every)] * 2
    return [
        Result(state=[block.state_dict() for block in blocks], losses=mine, num_updates=updates)
        for blocks, mine in zip(copies, losses, strict=True)
    ]


def test_without_staleness_replicas_are_averaging_by_hand(pool: Pool) -> None:
    run = Run(options={"m": (0, 0), "accumulate": 2, "clip": 0.1})
    loaders = [rows(7), [(-x, y) for x, y in rows(7, last=2)]]
    parts = pool.run(on_a_mesh, 4, run, loaders)
    for replica, expected in enumerate(by_hand(run, loaders)):
        column(parts, replica).check_is(expected)


def smooth() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double(), nn.Linear(8, 4).double()]


def test_stale_replicas_on_halves_of_a_batch_are_one_model_on_the_whole(pool: Pool) -> None:
    run = Run(blocks=smooth, options={"p": 1})
    loaders = [[(x.double() * factor, y) for x, y in rows(8, last=4)] for factor in (1, -1)]
    parts = pool.run(on_a_mesh, 4, run, loaders)
    whole = [tuple(map(torch.cat, zip(*halves, strict=True))) for halves in zip(*loaders, strict=True)]
    expected = simulated(Run(blocks=smooth, epochs=[whole], options={"p": 1}), 2)
    for replica in range(2):
        for block, state in enumerate(column(parts, replica).state):
            for name, value in state.items():
                torch.testing.assert_close(value, expected.state[block][name], rtol=1e-12, atol=1e-14)
                assert torch.equal(value, parts[2 * block][0][name])


def test_the_shorter_of_two_loaders_ends_the_pass_for_all(pool: Pool) -> None:
    parts = pool.run(on_a_mesh, 4, Run(options={"p": 1}), [rows(3), rows(6)])
    assert [updates for *_, updates, _ in parts] == [3, 3, 3, 3]
    assert [[text[:44] for text in told] for *_, told in parts] == [
        [],
        ["the loader of rank 1 had more batches than t"],
        [],
        [],
    ]


def on_a_part_of_the_world(rank: int, world: int, run: Run) -> Any:
    """Two blocks on the processes 1 and 3, which have made different numbers of groups."""
    mesh = DeviceMesh("cpu", [[1], [3]])
    if rank not in (1, 3):
        return None
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    schedule = schedule_of(rank // 2, 2, run, mesh=mesh)
    return part_of(schedule, train(run, schedule, reads=rank == 1))


def test_a_mesh_of_some_processes_trains_whatever_groups_each_has_made(pool: Pool) -> None:
    _, first, _, last = pool.run(on_a_part_of_the_world, 4, Run())
    joined([first, last]).check_is(simulated(Run(), 2))
