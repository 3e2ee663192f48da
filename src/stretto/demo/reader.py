"""A data set that streams its examples from an object store.

    index.json -> shards in an order of (seed, epoch) -> dealt over ranks -> dealt over workers
                                                                              |
    example <- order of (seed, epoch, shard) <- decode, check <- one GET, retried

One shard is one GET and at most about a batch, so a worker delivers a batch whenever a batch's bytes are there.
Each worker reads over one connection.
"""

import logging
import math
import os
import random
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from stretto.demo.client import Client, HelperClient, ReadError, connect, open_store
from stretto.demo.shards import INDEX_NAME, Index, ShardEntry, decode

__all__ = ["ShardDataset", "StoreError", "open_store"]

_LOG = logging.getLogger(__name__)
_MAX_BACKOFF_S = 5.0
# Clients of the process this one was forked from: not ours to use, to close or to collect.
_INHERITED: list[Client] = []


class StoreError(RuntimeError):
    """An object could not be read; the message names store, object, attempts, last cause and what to do."""


class ShardDataset(IterableDataset[tuple[Tensor, int]]):
    """Yields (image uint8 [1, H, W], label) from shards that `stretto.demo.shards.upload` wrote.

    Every example comes exactly once an epoch over all ranks and workers. The same (seed, epoch, number of ranks and
    workers) gives the same order. May be forked or pickled at any time; a DataLoader's persistent workers follow
    `set_epoch` too.

    Args:
        url: as for `open_store`.
        seed: of the orders, 0 or more.
        batch_size: of the DataLoader around it. Shards are then dealt so that at most one worker has a short batch
            and `len()` is right for any number of workers; without it `len()` raises TypeError.
        retries: further attempts after a failed read.
        backoff_s: seconds before the first of them, doubled each time up to 5, times a keyed random factor in
            [0.5, 1].
        options: endpoint, keys and timeouts, as for `open_store`.
    """

    def __init__(
        self,
        url: str,
        *,
        seed: int = 0,
        batch_size: int | None = None,
        retries: int = 4,
        backoff_s: float = 0.1,
        **options: Any,
    ) -> None:
        checks = (
            ("seed", seed, 0),
            ("batch_size", batch_size or 1, 1),
            ("retries", retries, 0),
            ("backoff_s", backoff_s, 0),
        )
        for name, value, least in checks:
            if value < least:
                raise ValueError(f"{name} must be {least} or more, found {value!r}.")
        self.url, self.seed, self.batch_size = url, seed, batch_size
        self.retries, self.backoff_s, self.options = retries, backoff_s, options
        self._index: Index | None = None
        self._client: Client | None = None
        self._client_pid = 0
        self._epoch = 0
        # Persistent workers have a copy of this object, made before later epochs were set.
        self._shared_epoch = torch.zeros((), dtype=torch.int64)
        self._shared_epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._iterated_pid = 0
        self._rank, self._num_ranks = 0, 1
        self._find_rank()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, found {epoch!r}.")
        self._epoch = epoch
        self._shared_epoch.fill_(epoch)

    def __len__(self) -> int:
        """Return the number of examples this rank yields in the epoch that is set.

        Raises:
            TypeError: no `batch_size` was given, so the number of batches depends on the number of workers.
        """
        if self.batch_size is None:
            raise TypeError(
                "A ShardDataset without batch_size has no length; give ShardDataset(..., batch_size=...)."
            )
        return sum(shard.num_examples for group in self._share(self._epoch) for shard in group)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        # No generator: the epoch is the one at this call, not at the first example.
        worker = get_worker_info()
        again = worker is not None and self._iterated_pid == os.getpid()
        self._iterated_pid = os.getpid()
        epoch = int(self._shared_epoch) if again else self._epoch
        return self._examples(epoch, *((worker.id, worker.num_workers) if worker else (0, 1)))

    def __getstate__(self) -> dict[str, Any]:
        self._find_rank()
        return self.__dict__ | {"_client": None}

    def index(self) -> Index:
        """Return the store's index, read once.

        Raises:
            StoreError: it could not be read or is no index.
        """
        if self._index is None:
            self._index = Index.from_json(self._read(INDEX_NAME, None), f"{self.url}/{INDEX_NAME}")
        return self._index

    def _examples(self, epoch: int, worker: int, num_workers: int) -> Iterator[tuple[Tensor, int]]:
        for group in self._share(epoch)[worker::num_workers]:
            for shard in group:
                images, labels = self._decoded(shard)
                number = self.index().shards.index(shard)
                order = np.random.default_rng([self.seed, epoch, number]).permutation(len(labels))
                pixels = torch.from_numpy(images).unsqueeze(1)
                for row in order.tolist():
                    yield pixels[row], int(labels[row])

    def _share(self, epoch: int) -> list[list[ShardEntry]]:
        """Return this rank's shards in the order of the epoch, in groups that make whole batches."""
        self._find_rank()
        index = self.index()
        size = index.examples_per_shard
        order = np.random.default_rng([self.seed, epoch]).permutation(len(index.shards)).tolist()
        per_group = math.lcm(size, self.batch_size or 1) // size
        if per_group > 1:
            # Two groups of odd size could give two workers a short batch; the short shard joins the short group.
            order.sort(key=lambda number: index.shards[number].num_examples != size)
        groups = [order[start : start + per_group] for start in range(0, len(order), per_group)]
        return [[index.shards[number] for number in group] for group in groups[self._rank :: self._num_ranks]]

    def _find_rank(self) -> None:
        """Note rank and world size: a spawned worker knows them from here only."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank, self._num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def _decoded(self, shard: ShardEntry) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        data = self._read(shard.name, shard.size_bytes)
        try:
            images, labels = decode(data, f"{self.url}/{shard.name}")
        except ValueError as error:
            raise StoreError(str(error)) from error
        if len(labels) != shard.num_examples:
            raise StoreError(
                f"{self.url}/{shard.name} has {len(labels)} examples, {INDEX_NAME} says {shard.num_examples}; "
                "upload the data set again."
            )
        return images, labels

    def _read(self, name: str, expected_bytes: int | None) -> bytes:
        """Return an object of the expected size, after at most `1 + retries` attempts."""
        attempt = 0
        while True:
            attempt += 1
            try:
                data = self._connected().get(name)
                if expected_bytes is None or len(data) == expected_bytes:
                    return data
                cause = ReadError(f"truncated: {len(data):,} bytes, expected {expected_bytes:,}", permanent=False)
            except ReadError as error:
                self._disconnect()
                cause = error
            except BaseException:
                # Interrupted between question and answer: the next read must not get this one's answer.
                self._disconnect()
                raise
            if cause.permanent or attempt > self.retries:
                raise StoreError(
                    f"Could not read {name} of {self.url} (endpoint {self.options.get('endpoint', 'by default')}) "
                    f"in {attempt} attempt{'s' * (attempt > 1)}. Last cause: {cause}. Check that the store is up, "
                    "that it holds this object, and the keys; if it is only slow, raise retries or timeout_s."
                ) from cause
            jitter = random.Random(f"{self.seed}/{name}/{attempt}").uniform(0.5, 1.0)
            wait_s = jitter * min(_MAX_BACKOFF_S, self.backoff_s * 2 ** (attempt - 1))
            _LOG.warning(
                "Read of %s of %s failed (%s); retry %d of %d in %.2f s.",
                *(name, self.url, cause, attempt, self.retries, wait_s),
            )
            time.sleep(wait_s)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            _close(client, self._client_pid)

    def _connected(self) -> Client:
        if self._client is None or self._client_pid != os.getpid():
            if self._client is not None:
                _INHERITED.append(self._client)
            self._client = connect(self.url, self.options, in_worker=get_worker_info() is not None)
            self._client_pid = os.getpid()
            if isinstance(self._client, HelperClient):
                weakref.finalize(self, _close, self._client, os.getpid())
        return self._client


def _close(client: Client, pid: int) -> None:
    if pid == os.getpid():
        client.close()
