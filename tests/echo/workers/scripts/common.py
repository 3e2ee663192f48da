"""Data sets whose rows say where they come from, and a place for what each rank saw."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from stretto import EchoDataLoader


class Rows(Dataset[torch.Tensor]):
    """Row i is (i, 0)."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n = n
        self.first = first

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return torch.tensor([self.first + index, 0])


class Slow(Rows):
    """Reading a row takes some seconds."""

    def __init__(self, n: int, read_s: float) -> None:
        super().__init__(n)
        self.read_s = read_s

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.read_s)
        return super().__getitem__(index)


class Wide(Slow):
    """Rows of many numbers."""

    def __init__(self, n: int, num_columns: int, read_s: float) -> None:
        super().__init__(n, read_s)
        self.num_columns = num_columns

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index)[:1].repeat(self.num_columns)


class Stream(IterableDataset[torch.Tensor]):
    """The same as a stream that shares its rows out among the workers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(worker_id, self.n, num_workers):
            yield torch.tensor([index, 0])


class Sized(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.n


def add_noise(row: torch.Tensor) -> torch.Tensor:
    """Another second column at each use."""
    return torch.stack([row[0], torch.randint(1 << 40, ())])


def echo_loader(n: int = 100, num_workers: int = 0, **arguments: Any) -> EchoDataLoader:
    defaults: dict[str, Any] = {"batch_size": 8, "shuffle": True, "factor": 3, "seed": 3, "augment": add_noise}
    return EchoDataLoader(Rows(n), num_workers=num_workers, **{**defaults, **arguments})


def make_stream() -> EchoDataLoader:
    """Each rank reads the whole stream: nobody shards it."""
    return EchoDataLoader(Sized(40), 8, factor=3, augment=add_noise)


def is_loader(value: object) -> bool:
    return isinstance(value, torch.utils.data.DataLoader)


def rank() -> int:
    return int(os.environ["RANK"])


def write(results: dict[str, Any]) -> None:
    """Leave what this rank saw for the test; argv[2] is the folder."""
    Path(sys.argv[2], f"{rank()}.json").write_text(json.dumps(results))


def finish() -> None:
    """Leave together, so that no rank takes the store away while another still talks to it."""
    dist.barrier()
    dist.destroy_process_group()
