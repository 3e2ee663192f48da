"""Data sets for the tests of what is timed in workers, and loaders timed as `stretto run` times them."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stretto.profile.worker import WorkerSpec, time_fetcher, timed_init
from tests.echo.transforms import Add, AddNoise, Compose, Times


def timed_iter(loader: Any, directory: Path, iteration: int = 1) -> Iterator[Any]:
    """Begin an iteration whose fetches are timed."""
    spec = WorkerSpec(str(directory), 7, iteration)
    given = loader.worker_init_fn
    loader.worker_init_fn = timed_init(spec, given)
    try:
        batches = iter(loader)
    finally:
        loader.worker_init_fn = given
    if loader.num_workers == 0:
        time_fetcher(getattr(batches, "_batches", batches)._dataset_fetcher, spec, -1)
    return batches


def plain_iter(loader: Any, directory: Path, iteration: int = 1) -> Iterator[Any]:
    return iter(loader)


def seed_all() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def global_states() -> list[str]:
    return [str(torch.get_rng_state().tolist()), str(np.random.get_state()), str(random.getstate())]


class Noisy(Dataset[Any]):
    """Examples that depend on all global states."""

    def __init__(self, n: int = 24) -> None:
        self.n = n
        self.transform: Any = Compose([Add(1), AddNoise(), Times(2)])

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return {"image": self.transform(torch.arange(3.0) + index), "index": index}


class Fetching(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in reversed(indices)]


class Stream(IterableDataset[Any]):
    """A worker's share of some noisy examples."""

    def __init__(self, n: int = 21) -> None:
        self.examples = Noisy(n)
        self.transform = Times(3)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, self.examples.n, step):
            yield self.transform(self.examples[index]["image"])


class Resumable(IterableDataset[Any]):
    """A stream with state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 12:
            self.at += 1
            yield torch.rand(2) + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class SlowDisk(Noisy):
    """Reading waits and does not compute."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


class Deadly(Noisy):
    """Kills its process where it should read index 12."""

    def __getitem__(self, index: int) -> Any:
        if index == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Refuses:
    """Raises for values above 5."""

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if value[0] > 5:
            raise ValueError("too large")
        return value


class Chooses(Noisy):
    """Has no transform until the fourth example."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = None

    def __getitem__(self, index: int) -> Any:
        value = torch.arange(3.0) + index
        if self.transform is not None:
            value = self.transform(value)
        if index == 3:
            self.transform = Add(1)
        return value


class Inspects(Dataset[Any]):
    """Has a loader of its own, and looks at itself in torch's WorkerInfo."""

    def __init__(self) -> None:
        self.inner = DataLoader(Noisy(4), batch_size=2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        num_inner = len([*iter(self.inner)])
        info = get_worker_info()
        return num_inner, info is None or info.dataset is self


def read_bytes(path: str) -> bytes:
    return path.encode()


def decode(data: bytes) -> torch.Tensor:
    return torch.full((2, 2), float(len(data)))


def jitter(image: torch.Tensor) -> torch.Tensor:
    return image + torch.rand(2, 2)


def fails(value: Any) -> Any:
    raise ValueError("as it should")
