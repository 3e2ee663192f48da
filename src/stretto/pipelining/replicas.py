"""Data-parallel replicas of a block: alike at the beginning, their gradients averaged before each update.

An explicit all-reduce after the backward that ends a group. DistributedDataParallel would hide the parameters'
names and broadcast the buffers in the forward.
"""

import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from stretto.pipelining.failure import FailureBoard

_POLL_S = 0.5


class Replicas:
    """The `group` of processes that hold copies of one block.

    Waits look at the `board`: a replica whose pipeline failed never comes to the all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup, board: FailureBoard) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self._board = board

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all replicas the values that the first has, as models made with different seeds differ."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace gradients by their mean over the replicas, exactly alike in all of them.

        A gradient that some replicas do not have counts as 0 there; one that none has stays None.
        """
        by_type: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for dtype, together in by_type.items():
            flat = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in together]
            have = torch.tensor([p.grad is not None for p in together], dtype=dtype, device=together[0].device)
            summed = torch.cat([*flat, have])
            self._all_reduce(summed, dist.ReduceOp.SUM)
            *gradients, have = torch.split(summed, [p.numel() for p in together] + [len(together)])
            for parameter, gradient, count in zip(together, gradients, have.tolist(), strict=True):
                parameter.grad = (gradient / self.size).view_as(parameter) if count else None

    def all_have_more(self, has_more: bool) -> bool:
        """Whether every replica's loader has another batch."""
        votes = torch.tensor([int(has_more)])
        self._all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def _all_reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        work = self.group.allreduce([tensor], options)
        arrived = threading.Event()
        work.get_future().add_done_callback(lambda _: arrived.set())
        while not arrived.wait(_POLL_S):
            if failure := self._board.read():
                raise failure
        work.wait()
