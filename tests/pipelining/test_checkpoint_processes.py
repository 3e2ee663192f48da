"""Checkpoints of processes: the same as a simulation's, told of by all, and none waits for another in vain."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stretto.pipelining import BlockFailed, ScheduleDSP
from tests.pipelining.processes import Pool
from tests.pipelining.test_checkpoint import go_on, names_in, same, tensors
from tests.pipelining.training import Run, adamw, falling, rows, schedule_of, simulation_of

ADAMW = Run(optimizer=adamw, scheduler=falling, options={"p": 1, "accumulate": 2, "seed": 3})
STASHED = Run(options={"p": 1, "backward_params": "stashed"})


def train_on(schedule: Any, run: Run, end: int | None = None) -> list[Any]:
    """The losses of the batches that are left before `end`, on the last block."""
    is_first = not isinstance(schedule, ScheduleDSP) or schedule.block.index == 0
    rest = run.epochs[0][schedule.num_batches : end]
    losses = [schedule.step(*batch) if is_first else schedule.step() for batch in rest]
    if end is None:
        schedule.flush()
    return losses


def weights(schedule: ScheduleDSP) -> list[torch.Tensor]:
    return list(schedule.block.module.state_dict().values())


def save_at(rank: int, world: int, run: Run, folder: Path, steps: Sequence[int]) -> None:
    schedule = schedule_of(rank, world, run)
    for n in steps:
        train_on(schedule, run, n)
        schedule.save(folder / str(n))
    schedule.flush()


def resume_at(rank: int, world: int, run: Run, folder: Path, steps: Sequence[int]) -> list[Any]:
    found = []
    for n in steps:
        schedule = schedule_of(rank, world, run)
        schedule.load(folder / str(n))
        found.append((train_on(schedule, run), weights(schedule)))
    return found


@pytest.mark.parametrize("run", [ADAMW, STASHED], ids=["AdamW, open groups", "stashed"])
def test_processes_and_simulation_resume_themselves_and_each_other(run: Run, pool: Pool, tmp_path: Path) -> None:
    expected = go_on(simulation_of(run), run)
    steps = (1, 5, 9)
    simulation = simulation_of(run)
    for n in steps:
        train_on(simulation, run, n)
        simulation.save(tmp_path / "simulation" / str(n))
    pool.run(save_at, 3, run, tmp_path / "processes", steps)
    for folder in ("simulation", "processes"):
        parts = pool.run(resume_at, 3, run, tmp_path / folder, steps)
        for at, n in enumerate(steps):
            values = [value for each in parts for value in each[at][1]]
            assert same(expected[n:], parts[-1][at][0] + values), (folder, n)
            resumed = simulation_of(run)
            resumed.load(tmp_path / folder / str(n))
            assert same(expected[n:], go_on(resumed, run)), (folder, n)


def back_to_the_first(rank: int, world: int) -> Any:
    """Train on something else, then go back to the state before it, in the middle of a step's messages."""
    schedule = schedule_of(rank, world, ADAMW)
    first = schedule.state_dict()
    for x, y in rows(6):
        schedule.step(-x, target=y)
    schedule.load_state_dict(first)
    return train_on(schedule, ADAMW), weights(schedule)


def test_loading_in_the_middle_drops_what_is_under_way(pool: Pool) -> None:
    parts = pool.run(back_to_the_first, 3)
    expected = go_on(simulation_of(ADAMW), ADAMW)
    assert same(expected, parts[-1][0] + [value for _, values in parts for value in values])


def save_until_killed(rank: int, world: int, run: Run, folder: Path) -> None:
    schedule = schedule_of(rank, world, run)
    for x, y in schedule.feed(run.epochs[0]):
        schedule.step(x, target=y)
        schedule.save(folder)
        if (rank, schedule.num_batches) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)


def resume(rank: int, world: int, run: Run, folder: Path) -> Any:
    schedule = schedule_of(rank, world, run)
    schedule.load(folder)
    losses = [schedule.step(x, target=y) for x, y in schedule.feed(run.epochs[0][5:])]
    schedule.flush()
    return losses, weights(schedule)


def test_after_a_process_was_killed_the_last_checkpoint_goes_on(pool: Pool, tmp_path: Path) -> None:
    first, _, last = pool.outcomes(save_until_killed, 3, ADAMW, tmp_path / "last")
    assert isinstance(first, BlockFailed)
    assert isinstance(last, BlockFailed)
    parts = pool.run(resume, 3, ADAMW, tmp_path / "last")
    expected = go_on(simulation_of(ADAMW), ADAMW)
    assert same(expected[5:], parts[-1][0] + [value for _, values in parts for value in values])


class Deadly:
    """A scheduler whose state ends its process."""

    def step(self) -> None:
        pass

    def state_dict(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(rank: int, world: int, folder: Path, flush: bool) -> None:
    schedule = schedule_of(rank, world, STASHED, lr_scheduler=Deadly() if rank == 2 else None)
    train_on(schedule, STASHED, 6)
    if flush:
        schedule.flush()
    schedule.save(folder)


@pytest.mark.parametrize("flush", [False, True], ids=["under way", "flushed"])
def test_a_process_that_is_killed_while_it_saves_is_told_to_all(flush: bool, pool: Pool, tmp_path: Path) -> None:
    first, second, _ = pool.outcomes(killed_while_saving, 3, tmp_path / "last", flush)
    assert "rank 2 failed" in str(second) if not flush else "without a word" in str(second)
    assert "ended without a word" in str(first)
    assert not (tmp_path / "last").exists()


def failing_instead_of_saving(rank: int, world: int, folder: Path) -> None:
    with schedule_of(rank, world, Run(options={"m": (0, 0, 0)})) as schedule:
        train_on(schedule, STASHED, 3)
        if rank == 2:
            raise ValueError("broke")
        schedule.save(folder)


def test_a_process_that_fails_while_others_save_is_told_to_them(pool: Pool, tmp_path: Path) -> None:
    first, second, third = pool.outcomes(failing_instead_of_saving, 3, tmp_path / "last")
    for told in (first, second):
        assert isinstance(told, BlockFailed)
        assert told.rank == 2
        assert "broke" in told.traceback
    assert str(third) == "broke"
    assert names_in(tmp_path) == []


class Unsaveable:
    """A scheduler with something in its state that no plain file holds."""

    def step(self) -> None:
        pass

    def state_dict(self) -> Any:
        return {"made_by": self}


def refused_and_going_on(rank: int, world: int, folder: Path) -> Any:
    """Everything that is refused, in the middle of a run that then goes on."""
    schedule = schedule_of(rank, world, STASHED, lr_scheduler=Unsaveable() if rank == 2 else None)
    told = []

    def note(call: Any, *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    losses = train_on(schedule, STASHED, 3)
    note(schedule.save, folder / "own")
    note(schedule.load, folder / "nothing")
    note(schedule.load, folder / "other m")
    note(schedule.load, folder / "two blocks")
    state = torch.load(folder / f"{min(rank, 1)}.pt", weights_only=True)
    note(schedule.load_state_dict, state)
    note(schedule.load_state_dict, None if rank == 1 else schedule.state_dict() if rank == 0 else state)
    note(schedule.load_weights, {})
    return told, losses + train_on(schedule, STASHED), weights(schedule)


def test_one_block_saves_without_torch_distributed(tmp_path: Path) -> None:
    schedule = schedule_of(0, 1, ADAMW, m=0, p=0)
    train_on(schedule, ADAMW, 5)
    schedule.save(tmp_path / "saved")
    expected = train_on(schedule, ADAMW) + weights(schedule)
    again = schedule_of(0, 1, ADAMW, m=0, p=0)
    again.load(tmp_path / "saved")
    assert same(expected, train_on(again, ADAMW) + weights(again))
    assert same(list(again.merged_weights().values()), weights(again))


def test_what_one_process_cannot_save_or_load_all_refuse_and_go_on(pool: Pool, tmp_path: Path) -> None:
    other = Run(options=STASHED.options | {"p": 0})
    simulation_of(other).save(tmp_path / "other m")
    simulation_of(STASHED, 2).save(tmp_path / "two blocks")
    simulation = simulation_of(STASHED)
    for n in range(2):
        torch.save(simulation.state_dict(), tmp_path / f"{n}.pt")
        train_on(simulation, STASHED, n + 1)
    parts = pool.run(refused_and_going_on, 3, tmp_path)
    for told, *_ in parts:
        saving, nothing, other_m, two, unlike, no_state, under_way = told
        assert "TypeError: " in saving
        assert "made_by" in saving
        assert nothing.startswith("FileNotFoundError: ")
        assert "2,1,0; stashed)', this pipeline has staleness='DSP(1,1,0; 4,2,0; stashed)'" in other_m
        assert "staleness='DSP(1,0; 2,0; stashed)', this pipeline has staleness='DSP(1,1,0; 4,2,0; sta" in two
        assert "lr_scheduler=None, this pipeline has lr_scheduler='Unsaveable'" in unlike
        assert "the state is a NoneType: expected what state_dict() gave" in no_state
        assert "ValueError: " in under_way
        assert "batches are under way after batch 3" in under_way
    assert not (tmp_path / "own").exists()
    assert not (tmp_path / "own.stretto-saving").exists()
    expected = go_on(simulation_of(STASHED), STASHED)
    assert same(expected, parts[-1][1] + [value for *_, values in parts for value in values])


def states_of_two_steps(rank: int, world: int, folder: Path) -> tuple[str, str]:
    schedule = schedule_of(rank, world, STASHED)
    with pytest.raises(ValueError, match="batches") as of_states:
        schedule.load_state_dict(torch.load(folder / f"{min(rank, 1)}.pt", weights_only=True))
    with pytest.raises(ValueError, match="expected one folder") as of_folders:
        schedule.save(folder / f"mine {min(rank, 1)}")
    return str(of_states.value), str(of_folders.value)


def test_states_of_two_steps_and_two_folders_are_refused_by_all(pool: Pool, tmp_path: Path) -> None:
    simulation = simulation_of(STASHED)
    for n in range(2):
        torch.save(simulation.state_dict(), tmp_path / f"{n}.pt")
        train_on(simulation, STASHED, n + 1)
    for of_states, of_folders in pool.run(states_of_two_steps, 3, tmp_path):
        assert of_states == "blocks have seen [0, 1] batches: expected all of them at the end of the same step"
        assert "['mine 0', 'mine 1']" in of_folders
    assert names_in(tmp_path) == ["0.pt", "1.pt"]


def on_a_mesh(rank: int, world: int, folder: Path, resumes: bool) -> Any:
    """Process (k, r) of 2 blocks and 2 replicas, whose batch norms see other batches."""
    stage, replica = divmod(rank, 2)
    run = Run(epochs=[[(x + replica, y) for x, y in rows(7)]], options={"p": 1, "accumulate": 2})
    schedule = schedule_of(stage, 2, run, mesh=init_device_mesh("cpu", (2, 2)))
    if resumes:
        schedule.load(folder)
    else:
        train_on(schedule, run, 5)
        schedule.save(folder)
    return train_on(schedule, run), weights(schedule), schedule.merged_weights()


def test_replicas_resume_each_with_its_own_batches_and_buffers(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(on_a_mesh, 4, tmp_path / "saved", False)
    assert [name for name in names_in(tmp_path / "saved") if name.startswith("block")] == [
        "block_0.pt",
        "block_0_replica_1.pt",
        "block_1.pt",
        "block_1_replica_1.pt",
    ]
    resumed = pool.run(on_a_mesh, 4, tmp_path / "saved", True)
    for (losses, values, merged), (losses_again, values_again, _) in zip(expected, resumed, strict=True):
        assert losses == losses_again
        assert same(values, values_again)
        assert same(list(merged.values()), expected[0][1] + expected[2][1])
    assert not same(expected[0][1], expected[1][1]), "the buffers differ"
    with pytest.raises(ValueError, match="replicas=2, this pipeline has replicas=1"):
        simulation_of(Run(options={"p": 1, "accumulate": 2}), 2).load(tmp_path / "saved")


def merged_and_back(rank: int, world: int) -> Any:
    schedule = schedule_of(rank, world, STASHED)
    train_on(schedule, STASHED)
    merged = schedule.merged_weights()
    with torch.no_grad():
        for parameter in schedule.block.module.parameters():
            parameter.zero_()
    wrong = {**merged} if rank != 1 else {name: value for name, value in merged.items() if name != "1.2.bias"}
    with pytest.raises(ValueError, match=r"the weights do not fit: missing \['1.2.bias'\], unexpected \[\]$"):
        schedule.load_weights(wrong)
    schedule.load_weights(merged)
    return merged, weights(schedule)


def test_merged_weights_are_in_every_process_the_plain_models(pool: Pool) -> None:
    simulation = simulation_of(STASHED)
    train_on(simulation, STASHED)
    model = nn.Sequential(*STASHED.make_blocks(3))
    parts = pool.run(merged_and_back, 3)
    for merged, _ in parts:
        model.load_state_dict(merged, strict=True)
        assert list(merged) == list(model.state_dict())
        assert same(list(merged.values()), tensors(simulation))
    assert same([value for _, values in parts for value in values], tensors(simulation))
