"""A script that trains a split model and fails: MODE RANK [barrier]."""

import os
import signal
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from stretto.pipelining import ScheduleDSP

MODE, WHERE = sys.argv[1], int(sys.argv[2])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 12 and RANK == WHERE:
            if MODE == "block":
                raise ValueError("the block broke")
            if MODE == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if MODE == "exit":
                sys.exit(3)
        return self.linear(x)


def load() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for n in range(30):
        if n == 9 and MODE == "loader":
            raise KeyError("the loader broke")
        yield torch.randn(4, 8), torch.randint(0, 8, (4,))


def train(schedule: ScheduleDSP) -> None:
    for n, (x, y) in enumerate(schedule.feed(load())):
        if RANK == WHERE and n == 7:
            if MODE == "user":
                raise OSError("the script broke")
            if MODE == "leave":
                return
        schedule.step(x, target=y)
    schedule.flush()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    block = Failing()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    schedule = ScheduleDSP((block, RANK, WORLD), optimizer, functional.cross_entropy)
    if MODE == "leave":
        train(schedule)
        return
    with schedule:
        train(schedule)


if __name__ == "__main__":
    try:
        main()
    finally:
        if "barrier" in sys.argv:
            dist.barrier()
