"""What fails in one process is raised in all, wherever it fails; in processes that live on."""

import atexit
import gc
import os
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from stretto.pipelining import BlockFailed, ScheduleDSP
from tests.pipelining.processes import Pool
from tests.pipelining.test_checkpoint_processes import failing_instead_of_saving
from tests.pipelining.training import rows


class BrokenError(RuntimeError):
    pass


class Failing(nn.Module):
    """Raises in its call number `at`, counted from 0 and recomputes included."""

    def __init__(self, layer: nn.Module, at: int | None, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error
        self.layer = layer
        self.at = at
        self.num_calls = 0
        self.threads: set[str] = set()
        """Those that looked at the block: a second one would meet gradients that the first is dropping."""

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        self.threads.add(threading.current_thread().name)
        return super().buffers(recurse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls - 1 == self.at:
            raise self.error("the block broke")
        return self.layer(x)


class Mark:
    """Passes between blocks, and cannot be packed, or not be unpacked."""

    def __init__(self, breaks: str | None) -> None:
        self.breaks = breaks

    def __getstate__(self) -> str | None:
        if self.breaks == "packing":
            raise BrokenError("packing broke")
        return self.breaks or ""

    def __setstate__(self, breaks: str) -> None:
        self.breaks = None
        if breaks:
            raise BrokenError("unpacking broke")


class Marking(nn.Linear):
    def __init__(self, breaks: str | None) -> None:
        super().__init__(6, 6)
        self.breaks = breaks

    def forward(self, x: Any, mark: Mark | None = None) -> tuple[torch.Tensor, Mark]:
        return super().forward(x), Mark(self.breaks)


class FailingSGD(torch.optim.SGD):
    def step(self, closure: None = None) -> None:
        raise BrokenError("the optimizer broke")


def failing_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise BrokenError("the loss broke")


def load(fails_at: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for n, pair in enumerate(rows(9)):
        if n == fails_at:
            raise BrokenError("the loader broke")
        yield pair


@dataclass(frozen=True, kw_only=True)
class Case:
    """What fails, and when. All of it on rank `where`."""

    where: int
    call: int | None = None
    loader: int | None = None
    optimizer: bool = False
    loss: bool = False
    user: int | None = None
    error: type[BaseException] = BrokenError


def fail(rank: int, world: int, case: Case, mesh_shape: tuple[int, int] | None = None) -> Any:
    """What is raised here, and again by the next call; whether threads are left; which looked at the block."""
    place, num_stages = (rank, world) if mesh_shape is None else (rank // mesh_shape[1], mesh_shape[0])
    here = rank == case.where
    layer = nn.Linear(*[(6, 8), (8, 8), (8, 4)][place]) if num_stages == 3 else nn.Linear(6, 6)
    block = Failing(layer, case.call if here else None, case.error)
    optimizer = (FailingSGD if here and case.optimizer else torch.optim.SGD)(block.parameters(), lr=0.1)
    loss_fn = failing_loss if here and case.loss else functional.cross_entropy
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape)
    schedule = ScheduleDSP((block, place, num_stages), optimizer, loss_fn, p=1, mesh=mesh)
    raised: list[BaseException] = []
    try:
        with schedule:
            for n, (x, y) in enumerate(schedule.feed(load(case.loader if here else None))):
                if here and n == case.user:
                    raise case.error("the script broke")
                schedule.step(x, target=y)
                if n == 4:
                    schedule.eval(x)
            schedule.flush()
    except BaseException as error:
        raised.append(error)
    finally:
        dist.barrier()
    try:
        schedule.step(torch.ones(1, 6))
    except BlockFailed as error:
        raised.append(error)
    for thread in threading.enumerate():
        if "stretto" in thread.name:
            thread.join(10)
    left = [thread.name for thread in threading.enumerate() if "stretto" in thread.name]
    first, second = raised
    return (
        type(first),
        "\n".join(traceback.format_exception(first)),
        getattr(first, "rank", None),
        second.rank,
        left,
        block.threads,
    )


def check(found: list[Any], case: Case, cause: str) -> None:
    for rank, (kind, text, of_first, of_second, left, threads) in enumerate(found):
        assert kind is (case.error if rank == case.where else BlockFailed), text
        assert cause in text
        assert of_first == (None if rank == case.where else case.where)
        assert of_second == case.where
        assert left == []
        assert threads == {"MainThread"}
    assert f"on rank {case.where}; the other ranks of the pipeline were told" in found[case.where][1]


# m = 4, 2, 0; 9 batches; one evaluation after the batches 0 to 4
CASES = {
    "in the warm-up, first": (
        Case(where=0, call=1),
        "in block 0 of 3, batch 1, whose input was [4, 6] torch.float32",
    ),
    "in the warm-up, middle": (Case(where=1, call=0), "in block 1 of 3, batch 0"),
    "in the first call, last": (Case(where=2, call=0), "in block 2 of 3, batch 0"),
    "in a forward, first": (Case(where=0, call=7), "in block 0 of 3, batch 5"),
    "in a recompute, first": (Case(where=0, call=5), "in block 0 of 3, batch 0"),
    "in a recompute, middle": (Case(where=1, call=5), "in block 1 of 3, batch 1"),
    "in a forward, last": (Case(where=2, call=7), "in block 2 of 3, batch 6"),
    "in flush, first": (Case(where=0, call=18), "in block 0 of 3, batch 8"),
    "in flush, middle": (Case(where=1, call=18), "in block 1 of 3, batch 8"),
    "in eval, first": (Case(where=0, call=6), "the block broke"),
    "in eval, middle": (Case(where=1, call=8), "the block broke"),
    "in eval, last": (Case(where=2, call=5), "the block broke"),
    "in the optimizer, first": (Case(where=0, optimizer=True), "the optimizer broke"),
    "in the optimizer, middle": (Case(where=1, optimizer=True), "the optimizer broke"),
    "in the optimizer, last": (Case(where=2, optimizer=True), "the optimizer broke"),
    "in the loss": (Case(where=2, loss=True), "in block 2 of 3, batch 0"),
    "in the loader's first batch": (Case(where=0, loader=0), "the loader broke"),
    "in the loader": (Case(where=0, loader=6), "the loader broke"),
    "in the script, first": (Case(where=0, user=5), "the script broke"),
    "in the script, middle": (Case(where=1, user=5), "the script broke"),
    "in the script, last": (Case(where=2, user=5), "the script broke"),
    "sys.exit, first": (Case(where=0, call=7, error=SystemExit), "SystemExit: the block broke"),
    "sys.exit, middle": (Case(where=1, call=7, error=SystemExit), "SystemExit: the block broke"),
    "sys.exit, last": (Case(where=2, call=7, error=SystemExit), "SystemExit: the block broke"),
    "Ctrl-C, last": (Case(where=2, call=7, error=KeyboardInterrupt), "KeyboardInterrupt: the block broke"),
}


@pytest.mark.parametrize(("case", "cause"), CASES.values(), ids=CASES.keys())
def test_all_ranks_raise_before_a_barrier_that_the_script_ends_with(pool: Pool, case: Case, cause: str) -> None:
    check(pool.run(fail, 3, case), case, cause)


def pass_marks(rank: int, world: int, breaks: str) -> tuple[int | None, str]:
    """Block 0's message breaks; whom the error is said to be of, and its text."""
    block = Marking(breaks if rank == 0 else None)
    sgd = torch.optim.SGD(block.parameters(), lr=0.1)
    schedule = ScheduleDSP((block, rank, world), sgd, lambda output, target: output[0].sum())
    try:
        for x, y in schedule.feed(rows(3)):
            schedule.step(x, target=y)
        schedule.flush()
    except (BrokenError, BlockFailed) as error:
        return getattr(error, "rank", None), str(error)
    return None, "nothing was raised"


@pytest.mark.parametrize(("breaks", "of"), [("packing", [None, 0, 0]), ("unpacking", [1, 1, 1])])
def test_what_breaks_in_a_message_is_told_of_the_process_where_it_breaks(
    pool: Pool, breaks: str, of: list[int | None]
) -> None:
    found = pool.run(pass_marks, 3, breaks)
    assert [rank for rank, _ in found] == of
    assert all(f"{breaks} broke" in text for _, text in found)


class FailsAtTheEnd(torch.optim.SGD):
    num_updates = 0

    def step(self, closure: None = None) -> None:
        self.num_updates += 1
        if self.num_updates == 9:
            raise BrokenError("the optimizer broke")
        super().step()


def end_after_a_failure(rank: int, world: int) -> int:
    """The last block fails when its last gradient is sent, and the first hears of it before its loader ends."""
    layer = nn.Linear(6, 6)
    optimizer = (FailsAtTheEnd if rank == world - 1 else torch.optim.SGD)(layer.parameters(), lr=0.1)
    schedule = ScheduleDSP((layer, rank, world), optimizer, functional.cross_entropy, m=[0] * world)

    def load() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from rows(9)
        assert schedule._near.from_next is not None
        schedule._near.from_next.join(30)

    try:
        for x, y in schedule.feed(load()):
            schedule.step(x, target=y)
        schedule.flush()
    except BlockFailed as error:
        return error.rank
    except BrokenError:
        return rank
    finally:
        dist.barrier()
    return -1


@pytest.mark.parametrize("world", [2, 3])
def test_nothing_more_is_sent_to_a_block_that_was_told_of_a_failure(pool: Pool, world: int) -> None:
    assert pool.run(end_after_a_failure, world) == [world - 1] * world


@pytest.mark.parametrize("where", range(4))
def test_a_failure_reaches_all_replicas(pool: Pool, where: int) -> None:
    case = Case(where=where, call=5)
    check(pool.run(fail, 4, case, (2, 2)), case, "the block broke")


def end_a_fork(rank: int, world: int) -> int:
    """The updates made, where a process is forked in the middle and ends as a script's does."""
    layer = nn.Linear(6, 6)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    schedule = ScheduleDSP((layer, rank, world), sgd, functional.cross_entropy, p=1)
    for n, (x, y) in enumerate(schedule.feed(rows(9))):
        schedule.step(x, target=y)
        if n == 5 and rank == 0:
            if (child := os.fork()) == 0:
                warnings.simplefilter("ignore")
                atexit._run_exitfuncs()
                os._exit(0)
            os.waitpid(child, 0)
    schedule.flush()
    return schedule.block.num_updates


def test_the_end_of_a_forked_process_is_not_the_end_of_the_pipeline(pool: Pool) -> None:
    assert pool.run(end_a_fork, 2) == [9, 9]


def collect_garbage(rank: int, world: int) -> None:
    gc.collect()


def test_a_group_that_waited_for_a_failed_process_can_be_given_up(pool: Pool, tmp_path: Path) -> None:
    pool.outcomes(failing_instead_of_saving, 3, tmp_path / "last")
    pool.run(collect_garbage, 2)
