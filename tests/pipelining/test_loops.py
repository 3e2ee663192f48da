"""The loops that users write around a schedule."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.nn import functional

from stretto.pipelining import ScheduleDSP, simulate
from tests.pipelining.processes import Pool
from tests.pipelining.training import (
    Part,
    Run,
    adamw,
    joined,
    part_of,
    rows,
    schedule_of,
    simulated,
    simulation_of,
    train,
)

# Evaluation


def evaluate_everywhere(rank: int, world: int, run: Run) -> tuple[Part, list[Any]]:
    schedule = schedule_of(rank, world, run)
    return part_of(schedule, _evaluate(schedule, rank == 0, rank == world - 1, found := [])), found


def _evaluate(schedule: Any, reads: bool, is_last: bool, found: list[Any]) -> list[Any]:
    x = rows(2)[0][0] if reads else None
    found.append(schedule.eval(x))
    losses = []
    for _ in range(2):
        for n, (batch, target) in enumerate(schedule.feed(rows(5) if reads else None)):
            if n % 2 == 0:
                found.append(schedule.eval(x))
            losses.append(schedule.step(batch, target=target))
            found.append(schedule.eval(x))
        found.append(schedule.eval(x))
        schedule.flush()
        found += [schedule.eval(x), schedule.eval(x)]
    assert all((output is not None) == is_last for output in found)
    return losses


def test_evaluation_anywhere_in_the_loop_touches_nothing(pool: Pool) -> None:
    run = Run(epochs=[rows(5), rows(5)], options={"p": 1})
    parts, found = zip(*pool.run(evaluate_everywhere, 3, run), strict=True)
    joined(parts).check_is(simulated(run, 3))
    simulation = simulation_of(run)
    expected: list[torch.Tensor] = []
    _evaluate(simulation, True, True, expected)
    assert len(found[-1]) == len(expected) == 23
    assert torch.equal(found[-1][0], expected[0])
    assert torch.equal(found[-1][-1], expected[-1])


# Ends and beginnings


def leave_and_go_on(rank: int, world: int, run: Run, flush: bool) -> Part:
    schedule = schedule_of(rank, world, run)
    return part_of(schedule, _leave(schedule, rank == 0, flush))


def _leave(schedule: Any, reads: bool, flush: bool) -> list[Any]:
    losses = []
    for stop_at in (3, 1, 100):
        for n, (x, y) in enumerate(schedule.feed(rows(6) if reads else None)):
            losses.append(schedule.step(x, target=y))
            if n + 1 == stop_at:
                break
        if flush:
            schedule.flush()
    schedule.flush()
    return losses


@pytest.mark.parametrize("flush", [True, False])
def test_a_loop_left_with_a_break_goes_on_with_the_next(pool: Pool, flush: bool) -> None:
    run = Run(options={"p": 1}, epochs=[rows(6)[:3], rows(6)[:1], rows(6)], flush_between=flush)
    joined(pool.run(leave_and_go_on, 3, run, flush)).check_is(simulated(run, 3))


def step_without_feed(rank: int, world: int, run: Run) -> Part:
    schedule = schedule_of(rank, world, run)
    batches = run.epochs[0] if rank == 0 else [(None, None)] * len(run.epochs[0])
    losses = [schedule.step(x, target=y) for x, y in batches]
    schedule.flush()
    schedule.flush()
    return part_of(schedule, losses)


def test_steps_need_no_feed_where_all_know_their_number(pool: Pool) -> None:
    run = Run(options={"p": 1})
    joined(pool.run(step_without_feed, 3, run)).check_is(simulated(run, 3))


def two_schedules(rank: int, world: int, run: Run, other: Run) -> tuple[Part, Part]:
    schedules = [schedule_of(rank, world, each) for each in (run, other)]
    losses: tuple[list[Any], list[Any]] = ([], [])
    feeds = [schedule.feed(run.epochs[0] if rank == 0 else None) for schedule in schedules]
    for pairs in zip(*feeds, strict=True):
        for schedule, (x, y), mine in zip(schedules, pairs, losses, strict=True):
            mine.append(schedule.step(x, target=y))
    for schedule in reversed(schedules):
        schedule.flush()
    first, second = (part_of(schedule, mine) for schedule, mine in zip(schedules, losses, strict=True))
    return first, second


def test_two_schedules_share_the_processes(pool: Pool) -> None:
    run, other = Run(options={"p": 1}), Run(options={"backward_params": "stashed", "seed": 1})
    first, second = zip(*pool.run(two_schedules, 3, run, other), strict=True)
    joined(first).check_is(simulated(run, 3))
    joined(second).check_is(simulated(other, 3))


def in_a_group(rank: int, world: int, run: Run) -> Part | None:
    group = dist.new_group([3, 1])  # sorted by torch: rank 1 has block 0
    if rank not in (1, 3):
        return None
    schedule = schedule_of(rank // 2, 2, run, group=group)
    return part_of(schedule, train(run, schedule, reads=rank == 1))


def test_a_group_of_some_processes_trains_while_others_do_something_else(pool: Pool) -> None:
    _, first, _, last = pool.run(in_a_group, 4, Run())
    joined([first, last]).check_is(simulated(Run(), 2))


# torch's stages


def on_a_stage(rank: int, world: int, run: Run) -> Part:
    block = run.make_blocks(world)[rank]
    stage = PipelineStage(block, rank, world, torch.device("cpu"))
    schedule = ScheduleDSP(stage, run.make_optimizer(block), run.loss_fn, **run.options)
    return part_of(schedule, train(run, schedule, reads=rank == 0))


def test_a_pipeline_stage_is_taken_as_it_is(pool: Pool) -> None:
    run = Run(options={"p": 1})
    joined(pool.run(on_a_stage, 3, run)).check_is(simulated(run, 3))


class Plain(nn.Module):
    """A model that is no row of layers, for torch's `pipeline`."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.middle = middle
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


def cut_by_torch(middle: nn.Module) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own
        return pipeline(Plain(middle), (rows(2)[0][0],), split_spec={"middle": SplitPoint.BEGINNING})


MIDDLES = [nn.Tanh(), nn.Dropout(0.0), nn.Dropout(0.5), nn.BatchNorm1d(8)]
DATA = rows(5, last=4)


def on_a_pipe(rank: int, world: int) -> list[tuple[Part, Any]]:
    results = []
    for middle in MIDDLES:
        stage = cut_by_torch(middle).build_stage(rank, torch.device("cpu"))
        schedule = ScheduleDSP(stage, adamw(stage.submod.parameters()), functional.cross_entropy)
        part = part_of(schedule, train(Run(epochs=[DATA]), schedule, reads=rank == 0))
        try:
            output = schedule.eval(DATA[0][0] if rank == 0 else None)
        except RuntimeError as error:
            output = str(error)
        results.append((part, output))
    return results


def test_what_torchs_pipeline_cut_trains_under_the_names_of_the_model(pool: Pool) -> None:
    outputs = []
    for middle, (first, _), (last, output) in zip(MIDDLES, *pool.run(on_a_pipe, 2), strict=True):
        torch.manual_seed(0)
        model = Plain(middle)
        blocks = [nn.Sequential(model.first, nn.ReLU()), nn.Sequential(middle, model.last)]
        optimizers = [adamw(block.parameters()) for block in blocks]
        train(Run(epochs=[DATA]), simulate(blocks, optimizers, functional.cross_entropy), reads=True)
        merged = first[0] | last[0]
        assert merged.keys() == model.state_dict().keys()
        assert all(torch.equal(merged[name], value) for name, value in model.state_dict().items())
        outputs.append((output, model.eval()(DATA[0][0])))
    for output, expected in outputs[:2]:
        assert torch.equal(output, expected)
    named = [output.split()[3] for output, _ in outputs[2:]]
    assert named == ["aten.dropout.default", "aten.batch_norm.default"]
