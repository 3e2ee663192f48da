"""A map-style data set in a worker: what the plan uses again is kept, and finished anew for each use."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.utils.data import Dataset

from stretto.echo.buffer import DEFAULT_BATCHES, DEFAULT_BYTES, Bound
from stretto.echo.workers.board import Board, Count
from stretto.echo.workers.parts import ABSENT, Echoed, Parts
from stretto.tree import clone, count_bytes

Use = tuple[int, int, Any, int, bool]
"""(epoch, position in its order, index, which use from 0, whether it is the last)."""


class SingleUse(tuple[Any, ...]):
    """A `Use` that is not part of a batch (`batch_size=None`)."""


NUM_PROBED = 64
_STAND_IN = 1 << 40  # the uses of a stand-in are numbered from here on
_RESIDENT_BYTES = 600  # of Python objects around an example: record, dictionary entry, array or tensor headers


def resident_bytes(example: Any) -> int:
    """Bytes that keeping `example` costs."""
    return count_bytes(example) + _RESIDENT_BYTES


def count_residents(
    bound: Bound | None, sizes: Sequence[float], draw_size: int, num_workers: int, factor: float = math.inf
) -> int:
    """How many items may be resident in the workers of a process, together; as many in each, and at least a draw.

    An item is resident from the time that it may be drawn, but costs memory from its first use on. With a steady
    factor e that is a share 1 - 1/e of the residents (uses left are evenly spread), give or take 2 / sqrt(n).

    Args:
        bound: of all workers together; None for 64 draws, at most 1 GiB.
        sizes: bytes of some items. Items that differ in size get room for three standard deviations of their sum,
            and of what these few may say wrongly of the rest.
        draw_size: items of a batch.
        num_workers: at least 1.
        factor: of the items, if that is a number and they are read at their first use.

    Raises ValueError if the bound has no room for a batch in every worker.
    """
    most = DEFAULT_BATCHES * draw_size if bound is None else bound.items
    num_bytes = DEFAULT_BYTES if bound is None else bound.num_bytes
    if num_bytes is not None and any(sizes):
        mean, deviation = statistics.fmean(sizes), statistics.pstdev(sizes)
        # n items need mean n + 3 deviation (n / sqrt(len(sizes)) + sqrt(n)) bytes: quadratic in sqrt(n).
        per_item, margin = mean + 3 * deviation / math.sqrt(len(sizes)), 3 * deviation
        root = (math.sqrt(margin**2 + 4 * per_item * num_bytes / num_workers) - margin) / (2 * per_item)
        share_held = min(1.0, 1 - 1 / factor + 2 / max(1.0, root))
        fitting = num_workers * int(root**2 / share_held)
        most = fitting if most is None else min(most, fitting)
    if most is None:  # nothing to read
        most = draw_size * num_workers
    if bound is None:
        return max(most, draw_size * num_workers)
    if most < draw_size * num_workers:
        raise ValueError(
            f"buffer={bound} has room for {most} items, with batches of {draw_size} in {num_workers} workers: "
            f"expected room for a batch in each, {draw_size * num_workers} items. Give a larger buffer"
        )
    return most


@dataclass(slots=True)
class _Kept:
    example: Any
    num_bytes: int
    num_uses: int = 0


class EchoedDataset(Echoed, Dataset[Any]):
    """The data set that an EchoDataLoader's workers get: its indices are the uses of an `EchoPlan`.

    Each example is read at its first use, kept while the plan has uses for it, and let go at its last. One that is
    not there when it should be (after a resume or a lost worker) is read again under the same random state and
    counted. `dataset[i]` is what it is without echoing.
    """

    _OWN: ClassVar = {"total_dataset_length", "_epoch", "_kept", "_failed", "_kept_bytes", "_good"}
    total_dataset_length: int
    """Where it is there: of the last batch Accelerate's `gather_for_metrics` keeps this modulo the batch size, or
    all of it if that is 0."""

    def __init__(self, dataset: Any, parts: Parts) -> None:
        super().__init__(dataset, parts)
        self._epoch: tuple[int, int] | None = None
        self._kept: dict[int, _Kept] = {}
        self._failed: set[int] = set()
        self._kept_bytes = 0
        self._good: Use | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept: a worker that is started by pickling begins with nothing."""
        return {**self.__dict__, "_epoch": None, "_kept": {}, "_failed": set(), "_kept_bytes": 0}

    def __getitem__(self, use: Any) -> Any:
        """One use, for a loader with `batch_size=None`; or with an index of the data set, that example."""
        if isinstance(use, SingleUse):
            return self.__getitems__([use])[0]
        parts = self.parts
        return parts.after.run(parts.before.run(parts.source[use], use), use)

    def __getitems__(self, uses: Sequence[Use]) -> list[Any]:
        """The examples of a batch, one for each use, in order.

        Those that raised and may be skipped are missing. Where nothing would be left, one more use of the last
        example that did not raise stands in.
        """
        examples = []
        error: Exception | None = None
        with self.parts as parts:
            row = parts.row()
            self._begin(uses[0][0])
            for use, fetched in zip(uses, self._fetch(uses, row), strict=True):
                epoch, position, index, number, _ = use
                if position in self._failed:
                    continue
                try:
                    example = self._private(use, fetched, row)
                    examples.append(parts.finish(example, epoch, position, number, index, row))
                    self._good = use
                except Exception as raised:
                    error = raised
                    self._failed.add(position)
                    self._forget(position)
                    parts.failed(raised, index, row)
            if not examples:
                examples.append(self._stand_in(uses[0][1], error, row))
            row[Count.RESIDENTS] = len(self._kept)
            row[Count.RESIDENT_BYTES] = self._kept_bytes
            row[Count.BATCHES] += 1
        return examples

    def _begin(self, epoch: int) -> None:
        begun = epoch, self.board.num_loads
        if begun != self._epoch:  # what is left of an epoch that ended early
            self._epoch = begun
            self._kept.clear()
            self._failed.clear()
            self._kept_bytes = 0

    def _needs_reading(self, use: Use) -> bool:
        position, number = use[1], use[3]
        return position not in self._failed and (number == 0 or position not in self._kept)

    def _fetch(self, uses: Sequence[Use], row: Any) -> list[Any]:
        """For each use what the source holds, if that could be read together with others, else ABSENT."""
        missing = {use[1]: use[:3] for use in uses if self._needs_reading(use)}
        fetched = dict(zip(missing, self.parts.fetch([*missing.values()], row), strict=True))
        return [fetched.pop(use[1], ABSENT) for use in uses]

    def _private(self, use: Use, fetched: Any, row: Any) -> Any:
        """The example up to the echo point, for the caller to change as it likes."""
        epoch, position, index, number, is_last = use
        kept = None if number == 0 else self._kept.get(position)
        if kept is None:
            example = self.parts.read(epoch, position, index, row, fetched)
            row[Count.REREADS] += number > 0
            if is_last:
                return self._last(example)
            copy = clone(example)  # a view, say of a whole data set, would count as all that it is a view of
            kept = _Kept(copy, resident_bytes(copy) if self.board.share_bytes else 0)
            self._forget(position)  # of batches that were under way when a state was loaded
            self._kept[position] = kept
            self._kept_bytes += kept.num_bytes
            self._make_room(position)
            kept.num_uses = 1
            return self._last(example)
        if is_last:
            self._forget(position)
            return kept.example
        kept.num_uses += 1
        return clone(kept.example)

    def _last(self, example: Any) -> Any:
        """What was read, to be used: a copy where a stage may change it, for the data set may hold it itself."""
        return clone(example) if self.parts.after.stages else example

    def _stand_in(self, number: int, error: Exception | None, row: Any) -> Any:
        """An example for a batch in which all raised."""
        if self._good is None:
            raise ValueError("every example of a worker's first batch raised: nothing can stand in") from error
        epoch, position, index, _, _ = self._good
        kept = self._kept.get(position)
        row[Count.REREADS] += kept is None
        example = clone(kept.example) if kept else self.parts.read(epoch, position, index, row)
        return self.parts.finish(example, epoch, position, _STAND_IN + number, index, row)

    def _forget(self, position: int) -> None:
        if (kept := self._kept.pop(position, None)) is not None:
            self._kept_bytes -= kept.num_bytes

    def _make_room(self, newest: int) -> None:
        while self._kept_bytes > self.board.share_bytes > 0 and len(self._kept) > 1:
            used_most = max((position for position in self._kept if position != newest), key=self._num_uses)
            self._forget(used_most)

    def _num_uses(self, position: int) -> int:
        return self._kept[position].num_uses


class Probe(Echoed, Dataset[int]):
    """What examples cost to keep, measured in workers like those that will keep them."""

    _OWN: ClassVar = {"_indices"}

    def __init__(self, dataset: Any, parts: Parts, indices: Sequence[Any]) -> None:
        super().__init__(dataset, replace(parts, board=Board(NUM_PROBED)))  # these reads do not count
        self._indices = indices

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, at: int) -> int:
        """Bytes of an example; 0 for one that may be skipped, which is told of when it is."""
        with self.parts as parts:
            try:
                return resident_bytes(clone(parts.read(0, at, self._indices[at], parts.row())))
            except Exception:
                if parts.policy.on_error == "raise":
                    raise
                return 0
