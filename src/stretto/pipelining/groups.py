"""Groups of processes that only those who are in them need to know of.

Made from torch's backends directly. `dist.new_group` names a group by how many groups each process has made, so
that processes which have made different numbers of them would wait for each other forever.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

FOREVER = timedelta(days=365)
"""Blocks wait for loaders, validation and debuggers as long as it takes: failures are told, not timed."""
_abandoned: list[Any] = []
"""Backends whose end would wait for what is under way in them."""


class Group:
    """The processes `ranks` (global), with gloo for the host's memory and NCCL for a `device`'s.

    Making one is collective among them; `name` is the same in all, and new. Peers are places in `ranks`. `send` and
    `receive` raise ConnectionError where the peer is gone.
    """

    def __init__(self, name: str, ranks: Sequence[int], device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.own_rank = dist.get_rank()
        self.rank = self.ranks.index(self.own_rank)
        self.size = len(self.ranks)
        self.is_waiting = False
        """Whether an operation is under way that this process has given up."""
        store = PrefixStore(f"{name}_{'_'.join(map(str, self.ranks))}", world_store())
        self._host: Any = dist.ProcessGroupGloo(store, self.rank, self.size, FOREVER)
        self._device: Any = None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = FOREVER
            self._device = dist.ProcessGroupNCCL(PrefixStore("device", store), self.rank, self.size, options)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, works: list[dist.Work]) -> None:
        """Begin to send contiguous tensors, which must not change until what is added to `works` is waited for.

        All or none of them, whenever Ctrl-C comes: signals are handled between calls of Python's, not of C's.
        """
        sends = [self._of(tensor).send for tensor in tensors]
        with telling_connections():
            works.extend(map(operator.call, sends, [[tensor] for tensor in tensors], repeat(peer), repeat(0)))

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Wait for a tensor from `peer`; on a device, until the current stream would."""
        with telling_connections():
            self._of(tensor).recv([tensor], peer, 0).wait()

    def all_reduce(self, tensor: torch.Tensor, operation: Any) -> dist.Work:
        """Begin to reduce over all."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        work: dist.Work = self._of(tensor).allreduce([tensor], options)
        return work

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Begin to give all the tensor of `source`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        work: dist.Work = self._of(tensor).broadcast([tensor], options)
        return work

    def all_gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], dist.Work]:
        """Begin to gather tensors of one shape."""
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        return gathered, self._of(tensor).allgather([gathered], [tensor])

    def close(self) -> None:
        """Leave the others: whoever waits for this process is told so by the end of the connection."""
        if self.is_waiting:
            _abandoned.extend((self._host, self._device))
        self._host = self._device = None

    def _of(self, tensor: torch.Tensor) -> Any:
        return self._host if tensor.is_cpu else self._device


@contextmanager
def telling_connections() -> Iterator[None]:
    """Raise ConnectionError for torch's RuntimeError inside, where only a connection can break."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def world_store() -> Any:
    """The store of all processes; None where there is one process."""
    if not dist.is_initialized():
        return None
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()
