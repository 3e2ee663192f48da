"""Loaders whose batches say where they come from, loaders that wait for the test, and ways to drive them."""

import copy
import io
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stretto import EchoLoader
from stretto.echo.upstream import Fresh
from tests.patience import PATIENCE_S


def id_batches(num_batches: int, batch_size: int, *, last: int | None = None) -> list[torch.Tensor]:
    """Batches of consecutive numbers, the last one with `last` rows."""
    sizes = [batch_size] * (num_batches - 1) + [last or batch_size]
    return list(torch.arange(sum(sizes)).split(sizes))


def epoch(loader: Iterable[Any]) -> list[list[int]]:
    """The batches of one epoch as lists."""
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    """All items in order."""
    return [item for batch in batches for item in batch]


def upstream_threads() -> list[threading.Thread]:
    """The background threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "stretto-upstream"]


class Numbers(torch.utils.data.Dataset[int]):
    """The numbers below n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Rising:
    """A loader without a length: the n-th pass has the numbers from 1000 * n on."""

    def __init__(self, num_batches: int, batch_size: int) -> None:
        self._batches = id_batches(num_batches, batch_size)
        self.epoch = 0

    def set_epoch(self, number: int) -> None:
        self.epoch = number

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = 1000 * self.epoch
        return iter([start + batch for batch in self._batches])


class Counting:
    """A loader with state that hands out its own live dict."""

    def __init__(self) -> None:
        self.state = {"next": torch.zeros((), dtype=torch.int64)}

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (at := int(self.state["next"])) < 8:
            self.state["next"] += 1
            yield torch.arange(2 * at, 2 * at + 2)
        self.state["next"].zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)


class Gated:
    """A loader that hands out one batch for each `release`, and all there are after a `with` block."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self._gate = threading.Semaphore(0)
        self.num_released = 0
        self.is_open = False

    def __enter__(self) -> "Gated":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_open = True
        self.release()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            assert self.is_open or self._gate.acquire(timeout=PATIENCE_S), "the test released too few batches"
            yield batch

    def release(self, count: int = 1) -> None:
        """Let `count` more batches go."""
        self.num_released += count
        if count:
            self._gate.release(count)


class Failing:
    """A loader that raises `error` instead of batch `at`, until `repair` is called."""

    def __init__(self, batches: list[Any], at: int, error: BaseException) -> None:
        self._batches = batches
        self._at = at
        self._error: BaseException | None = error

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for at, batch in enumerate(self._batches):
            if at == self._at and self._error is not None:
                raise self._error
            yield batch

    def repair(self) -> None:
        self._error = None


def await_arrivals(loader: EchoLoader, count: int = 1) -> None:
    """Return once `count` fetched batches stand ready for admission, or the thread has ended."""
    upstream = loader._stream.upstream

    def have_arrived() -> bool:
        ready = upstream._ready
        num_fresh = sum(isinstance(item, Fresh) for item in ready)
        return num_fresh >= count or len(ready) >= 2 or upstream._thread is None

    with upstream._changed:
        assert upstream._changed.wait_for(have_arrived, PATIENCE_S)


def let_arrive(loader: EchoLoader, source: Gated, count: int) -> None:
    """Release `count` more batches; return once all that are out stand ready (the thread fetches two ahead)."""
    source.release(count)
    await_arrivals(loader, min(2, source.num_released - loader.stats().fresh_batches))


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint file gives back of `state`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def state_after(loader: EchoLoader, num_updates: int) -> dict[str, Any]:
    """The state after the first updates of an epoch; closes the loader."""
    with loader:
        iterator = iter(loader)
        for _ in range(num_updates):
            next(iterator)
        return through_file(loader.state_dict())


def rest_of_epoch(loader: EchoLoader, state: dict[str, Any]) -> list[Any]:
    with loader:
        loader.load_state_dict(state)
        return [*loader]


FIRST_LOSS, LATER_LOSS = 1.0, 0.75


class Follower:
    """Knows each item by its number, and so which of a batch an earlier one had."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def losses(self, batch: torch.Tensor) -> torch.Tensor:
        ids = batch.tolist()
        losses = [LATER_LOSS if item in self.seen else FIRST_LOSS for item in ids]
        self.seen.update(ids)
        return torch.tensor(losses)
