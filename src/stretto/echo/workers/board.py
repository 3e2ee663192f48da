"""Counters in shared memory: each worker process writes its own row, the main process reads them all."""

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray


class Count(IntEnum):
    """What is counted, by worker. Times are wall time in nanoseconds."""

    READS = 0
    """Examples read: fetched from the data set, and run through the stages before the echo point."""
    REREADS = 1
    """The part of them that had been read before and was not there any more."""
    SKIPPED = 2
    """Examples left out because they raised."""
    USES = 3
    READ_NS = 4
    USE_NS = 5
    """Time in the stages after the echo point."""
    RESIDENTS = 6
    RESIDENT_BYTES = 7
    """As far as they were measured, which is where the buffer's bound is in bytes."""
    BATCHES = 8


class Board:
    """Counts by worker, and the settings that the main process changes as it goes.

    Args:
        num_workers: rows; one for the main process where there are none.
    """

    def __init__(self, num_workers: int) -> None:
        self._shared = (
            _zeros(max(1, num_workers), len(Count), dtype=torch.int64),
            _zeros(4, dtype=torch.float64),
        )
        self._view()

    def __getstate__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._shared

    def __setstate__(self, shared: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._shared = shared
        self._view()

    def _view(self) -> None:
        self._counts: NDArray[np.int64] = self._shared[0].numpy()
        self._settings: NDArray[np.float64] = self._shared[1].numpy()

    def row(self, worker_id: int) -> NDArray[np.int64]:
        """The counts of one worker, by `Count`, to be written by it alone."""
        row: NDArray[np.int64] = self._counts[worker_id]
        return row

    def column(self, count: Count) -> NDArray[np.int64]:
        """A count of each worker, now."""
        return self._counts[:, count].copy()

    def total(self, count: Count) -> int:
        """The sum over the workers."""
        return int(self._counts[:, count].sum())

    @property
    def epoch(self) -> int:
        """The epoch that is about to begin or has begun."""
        return int(self._settings[0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._settings[0] = epoch

    @property
    def factor(self) -> float:
        """The echoing factor now in force."""
        return float(self._settings[1])

    @factor.setter
    def factor(self, factor: float) -> None:
        self._settings[1] = factor

    @property
    def share_bytes(self) -> int:
        """What one worker may keep; 0 where the plan alone bounds it."""
        return int(self._settings[2])

    @share_bytes.setter
    def share_bytes(self, share_bytes: int) -> None:
        self._settings[2] = share_bytes

    @property
    def num_loads(self) -> int:
        """How often a state was loaded: workers that live on let go what they kept before."""
        return int(self._settings[3])

    @num_loads.setter
    def num_loads(self, num_loads: int) -> None:
        self._settings[3] = num_loads


def _zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that all processes see which are forked or handed it."""
    shared: torch.Tensor = torch.zeros(shape, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return shared
