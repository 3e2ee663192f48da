import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pipelining.processes import Pool


def add_up(rank: int, world: int, added: int) -> float:
    value = torch.tensor(float(rank + added))
    dist.all_reduce(value)
    return value.item()


def fail_somehow(rank: int, world: int, how: str) -> str:
    if rank == 1 and how == "raise":
        raise ValueError("broke")
    if rank == 1 and how == "die":
        os._exit(3)
    if rank == 1 and how == "hang":
        time.sleep(100)
    return "well"


def test_each_call_has_a_world_of_its_own(pool: Pool) -> None:
    assert pool.run(add_up, 3, 1) == [6.0] * 3
    assert pool.run(add_up, 2, 1) == [3.0] * 2


def test_exceptions_deaths_and_hangs_are_told_and_the_next_call_works(pool: Pool) -> None:
    well, broken = pool.outcomes(fail_somehow, 2, "raise")
    assert (well, str(broken)) == ("well", "broke")
    assert "fail_somehow" in broken.__notes__[0]
    well, dead = pool.outcomes(fail_somehow, 2, "die")
    assert (well, str(dead)) == ("well", "the process died with exit code 3\n")
    assert pool.run(fail_somehow, 2, "not") == ["well"] * 2
    with pytest.raises(AssertionError, match=r"1\] did not end in 1 s\n(.|\n)*--- process 1"):
        pool.run(fail_somehow, 2, "hang", timeout_s=1)
    assert pool.run(add_up, 2, 0) == [1.0] * 2
