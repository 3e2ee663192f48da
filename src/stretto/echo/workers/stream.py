"""An iterable data set in a worker: its own stream, echoed there through one lane."""

import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from torch.utils.data import IterableDataset, get_worker_info

from stretto.echo.buffer import Bound
from stretto.echo.factor import Factor
from stretto.echo.keyed import derive_key
from stretto.echo.settings import rank_and_world_size
from stretto.echo.workers.board import Count
from stretto.echo.workers.lanes import Lanes, LaneSettings
from stretto.echo.workers.memory import NUM_PROBED, count_residents, resident_bytes
from stretto.echo.workers.parts import Echoed, Parts
from stretto.tree import clone

_WORKER = 0x3A9B  # the purpose of a worker's seed


class EchoedStream(Echoed, IterableDataset[Any]):
    """The data set that an EchoDataLoader's workers get: each echoes what its own iterator yields."""

    _OWN: ClassVar = {"_settings", "_bound", "_rank"}

    def __init__(
        self,
        dataset: Any,
        parts: Parts,
        factor: Factor,
        max_factor: int,
        batch_size: int,
        bound: Bound | None,
        seed: int,
    ) -> None:
        super().__init__(dataset, parts)
        is_open = factor == "auto"
        self._settings = LaneSettings(
            factor=1.0 if factor == "auto" else factor,
            max_uses=max_factor if factor == "auto" else math.ceil(factor),
            batch_size=batch_size,
            num_lanes=1,
            capacity=batch_size,
            drop_last=False,
            is_even=False,
            is_open=is_open,
            seed=seed,
        )
        self._bound = bound
        self._rank = 0

    def __len__(self) -> int:
        """Uses in an epoch, if the data set says how many examples it has and the factor is a number."""
        if self._settings.is_open:
            raise TypeError('factor="auto" has no length: an epoch is one pass over the data set')
        return round(self._settings.factor * len(self.dataset))

    def set_epoch(self, epoch: int) -> None:
        """Number the epoch that is about to begin, for the data set too."""
        super().set_epoch(epoch)
        self.board.epoch = epoch
        self._rank = rank_and_world_size()[0]  # a trainer may have started the ranks since the loader was made

    def __iter__(self) -> Iterator[Any]:
        if type(sys._getframe(1).f_locals.get("self")).__name__ == "IterableDatasetShard":
            raise ValueError(
                "Accelerate would deal the echoed examples out among the processes, so that all of them read all "
                "of the data: shard the data set itself by rank, and leave the EchoDataLoader out of prepare()"
            )
        return self._uses()

    def _uses(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        board, parts, epoch, size = self.board, self.parts, self.board.epoch, self._settings.batch_size
        seed = derive_key(self._settings.seed, _WORKER, self._rank, worker_id)
        row = board.row(worker_id)
        row[Count.RESIDENTS] = 0
        is_by_bytes = self._settings.max_uses > 1 and (self._bound is None or self._bound.items is None)
        source = self._read(row)
        # What the first examples cost decides how many are kept, so they are taken before any is used.
        head = list(itertools.islice(source, NUM_PROBED if is_by_bytes else 0))
        sizes = [resident_bytes(clone(example)) for example in head]  # a view counts as itself
        capacity = count_residents(self._bound, sizes, size, num_workers) // num_workers
        settings = replace(self._settings, capacity=capacity, seed=seed)
        lanes = Lanes(settings, epoch, itertools.chain(head, source))
        del head
        failed: set[int] = set()
        while True:
            if self._settings.is_open:
                lanes.factor = board.factor
            if (uses := next(lanes, None)) is None:
                return
            examples = []
            with parts:
                for position, kept, number, is_last in uses.rows():
                    row[Count.RESIDENTS] -= is_last
                    if position in failed:
                        continue
                    try:
                        example = kept if is_last else clone(kept)
                        examples.append(parts.finish(example, epoch, seed ^ position, number, position, row))
                    except Exception as error:
                        failed.add(position)
                        parts.failed(error, position, row)
            yield from examples

    def _read(self, row: Any) -> Iterator[Any]:
        """What the data set yields, counted and timed."""
        source = iter(self.dataset)
        while True:
            start = time.perf_counter_ns()
            try:
                example = next(source)
            except StopIteration:
                return
            row[Count.READS] += 1
            row[Count.RESIDENTS] += 1
            row[Count.READ_NS] += time.perf_counter_ns() - start
            yield example
