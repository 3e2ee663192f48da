"""Data sets that count their reads by themselves, in memory that all processes share."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from tests.echo.transforms import AddNoise

MOST_WORKERS = 4
_add_noise = AddNoise()


def noisy(example: torch.Tensor) -> torch.Tensor:
    """The example with all kinds of random numbers on all but its first element."""
    return torch.cat([example[:1], _add_noise(example)])


class Counted(Dataset[torch.Tensor]):
    """Example i is the tensor [i, i, i]."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._reads = torch.zeros(MOST_WORKERS, n, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        self._reads[worker.id if worker else 0, index] += 1
        return torch.full((3,), float(index))

    def reads(self) -> list[int]:
        """How often each index was read since the last call."""
        counts: list[int] = self._reads.sum(0).tolist()
        self._reads.zero_()
        return counts


class Together(Counted):
    """A data set that reads the examples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def indices(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    """The indices of the examples in each batch."""
    return [batch[:, 0].int().tolist() for batch in batches]


def flat(batches: Iterable[torch.Tensor]) -> list[int]:
    """The indices of the examples in all batches."""
    return [index for batch in indices(batches) for index in batch]


def multiset(batches: Iterable[torch.Tensor]) -> Counter[tuple[float, ...]]:
    """The examples of all batches, whatever their order."""
    return Counter(tuple(example) for batch in batches for example in batch.tolist())


def double_decode(index: int) -> torch.Tensor:
    return torch.full((3,), float(index))
