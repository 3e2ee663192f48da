"""How one block's failure becomes everyone's: within seconds, with the traceback of the first.

A block that fails says so to both neighbours, which pass it on, and leaves a copy in the store for those who only
see a connection close. A plain exception would let the others wait for half an hour.
"""

import json
import time
import traceback
from dataclasses import dataclass
from typing import Any


class BlockFailed(RuntimeError):  # noqa: N818  (the name that is documented)
    """Another process of the pipeline failed. Carries its `rank` and its `traceback`."""

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(f"rank {rank} failed:\n{traceback}")
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[type["BlockFailed"], tuple[int, str]]:
        return type(self), (self.rank, self.traceback)


@dataclass(frozen=True, slots=True)
class FailureBoard:
    """Where the first failure of a run stands for those who cannot be told: a key in the run's store."""

    store: Any
    """A torch.distributed store, or None where there is one process."""
    key: str
    rank: int

    def post(self, failure: BlockFailed) -> None:
        """Leave `failure` there, if it is the first and the store still lives."""
        if self.store is None:
            return
        try:
            self.store.compare_set(self.key, "", json.dumps([failure.rank, failure.traceback]))
        except RuntimeError:  # its process is gone
            return

    def read(self) -> BlockFailed | None:
        """The failure of another rank that stands there; None, too, if the process with the store has ended."""
        try:
            if self.store is None or not self.store.check([self.key]):
                return None
            rank, text = json.loads(self.store.get(self.key))
        except RuntimeError:
            return None
        return None if rank == self.rank else BlockFailed(rank, text)

    def explain(self, error: BaseException, peer: int, patience_s: float = 0.0) -> BlockFailed:
        """What stands behind a connection to `peer` that broke with `error`; news may take so long to come."""
        if isinstance(error, BlockFailed):
            return error
        deadline = time.monotonic() + patience_s
        while (failure := self.read()) is None and time.monotonic() < deadline:
            time.sleep(patience_s / 40)
        return failure or BlockFailed(
            peer, f"its process ended without a word, or the connection to it broke: {error}"
        )


def failure_of(error: BaseException, rank: int) -> BlockFailed:
    """What the others are told of `error` in this process."""
    if isinstance(error, BlockFailed):
        return error
    return BlockFailed(rank, "".join(traceback.format_exception(error)))
