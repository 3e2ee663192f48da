"""Data-parallel replicas of a block: alike at the beginning, their gradients averaged before each update.

An explicit all-reduce after the backward that ends a group. DistributedDataParallel would hide the parameters'
names and broadcast the buffers in the forward.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from stretto.pipelining.failure import FailureBoard
from stretto.pipelining.groups import Group

_NEWS_S = 2.0
"""How long after a connection broke the news is awaited that says which process failed."""


class Replicas:
    """The processes of a `group`, which hold copies of one block.

    A replica whose pipeline failed never comes to the all-reduce: it must call `close`, which ends the others' wait
    with BlockFailed.
    """

    def __init__(self, group: Group, board: FailureBoard) -> None:
        self._group = group
        self.size = group.size
        self.rank = group.rank
        self._other = next(rank for at, rank in enumerate(group.ranks) if at != self.rank)
        self._board = board

    def close(self) -> None:
        """Leave the others. A process that waits for this one is told so by the end of the connection."""
        self._group.close()

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all replicas the values that the first has, as models made with different seeds differ."""
        for tensor in tensors:
            first = tensor.detach().contiguous()
            # As bytes: gloo knows few types.
            self._group.broadcast(first.reshape(-1).view(torch.uint8), 0).wait()
            tensor.detach().copy_(first)

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace gradients by their mean over the replicas, exactly alike in all of them.

        A gradient that some replicas do not have counts as 0 there; one that none has stays None.
        """
        by_type: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise TypeError(
                    f"a weight of shape {tuple(parameter.shape)} has a {parameter.grad.layout} gradient, which "
                    "replicas do not average: make the layer with sparse=False"
                )
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
        try:
            self._group.all_reduce(tensor, operation).wait()
        except RuntimeError as error:
            raise self._board.explain(error, self._other, _NEWS_S) from error
