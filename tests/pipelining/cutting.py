"""A process that cuts a model together with others; imports little, as each of them does."""

import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
from torch import nn

from stretto.pipelining import measure
from stretto.pipelining.partition import partition


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # stands for work, many times that of the others
        return x.clone()


def cut_in_a_process(rank: int, store: str, results: SimpleQueue) -> None:
    torch.set_num_threads(1)
    measure._ENOUGH_S = 0
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    slow_at = 0 if rank == 0 else 4  # by its own times each process would cut elsewhere
    model = nn.Sequential(*[Slow() if at == slow_at else nn.Linear(3, 3) for at in range(5)])
    sample = torch.randn(4, 3)
    lengths = [len(block) for block in partition(model, 2, sample=sample)]
    with_one = [len(block) for block in partition(model, 2, sample=sample if rank == 0 else None)]
    told = []
    for wrong in (torch.randn(4, 2 + rank), sample if rank else None):
        try:
            partition(model, 2, sample=wrong)
        except (RuntimeError, ValueError) as error:
            told.append(str(error)[:20])
    results.put((rank, lengths, with_one, *told))
    dist.destroy_process_group()
