"""What is resident: a tensor pool for examples, a list for whole batches. Both are bounded in bytes or items.

Slots are numbers that the plan hands out. Both buffers offer the loader the same few calls:

    prepare(batch)       check a batch and measure it (any thread)
    excess(size)         how many residents would have to leave before it fits
    put(slots, it)       write it into slots (any thread, as long as the slots are lent to it)
    take(slots)          one batch drawn from the slots
    free(slots)          forget what the slots hold
    save, restore        leaf paths and leaves, for the state
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stretto.echo.leaf import PooledLeaf, why_not_rows
from stretto.echo.plan import SLOT_BYTES, IntArray
from stretto.state import to_plain
from stretto.tree import clone, count_bytes, describe, flatten, move, revive

DEFAULT_BATCHES = 64
DEFAULT_BYTES = 1 << 30

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_INSTEAD = 'unit="batch" echoes such batches whole'
_LEAVE_OUT = "Use checkpoint_buffer=False"


@dataclass(slots=True)
class Bound:
    """A bound in items, in bytes, or (the default) in both."""

    items: int | None
    num_bytes: int | None

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes" if self.num_bytes is not None else f"{self.items}"

    @classmethod
    def parse(cls, buffer: object) -> "Bound | None":
        """Read the `buffer` argument; None, the default, depends on the first batch.

        Raises TypeError for another type, ValueError for zero, a negative or an unreadable size.
        """
        if buffer is None:
            return None
        expected = 'expected a number of items >= 1, or bytes such as "512MiB" or "2GB"'
        if isinstance(buffer, int | np.integer) and not isinstance(buffer, bool):
            if buffer < 1:
                raise ValueError(f"buffer={buffer}: {expected}")
            return cls(int(buffer), None)
        if not isinstance(buffer, str):
            raise TypeError(f"buffer={buffer!r} is a {type(buffer).__name__}: {expected}")
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?I?B)\s*", buffer.upper())
        num_bytes = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
        if num_bytes < 1:
            raise ValueError(f"buffer={buffer!r}: {expected}")
        return cls(None, num_bytes)

    def too_small(self, batch_items: int, batch_bytes: int) -> ValueError:
        """The error that one batch is above this bound."""
        return ValueError(
            f"buffer={self} is smaller than one batch of {batch_items} items and {batch_bytes} bytes: "
            'give room for several batches, such as buffer="2GiB"'
        )


@dataclass(slots=True)
class Prepared:
    """A batch that a buffer has checked."""

    num_items: int
    size: int
    """In what the buffer's bound counts."""
    content: Any


class TensorPool:
    """Examples as rows of preallocated tensors, one for each leaf of a batch.

    A leaf is a tensor or a NumPy array whose first dimension counts the examples; types, dtypes, memory
    formats (channels_last, say) and tensor subclasses are kept.

    There is one batch of slots more than the capacity, so that the next batch can be copied in while the
    residents are in use; a bound in bytes includes it where it allows two batches or more.

    Args:
        batch: the first batch, not empty.
        batch_size: rows of a draw; None for those of `batch`.
        bound: None for 64 batches, at most 1 GiB.
        device: where the pool lives; where the batch lives when None.

    Raises TypeError when the batch cannot be taken apart, ValueError when the bound is below one batch.
    """

    is_fixed = True
    """Whether `num_slots` is all there will ever be."""

    def __init__(
        self, batch: Any, bound: Bound | None, device: torch.device | None, batch_size: int | None = None
    ) -> None:
        leaves, self.structure = flatten(batch)
        rows = count_rows(leaves, self.structure.paths)
        self.batch_size = rows = batch_size or rows
        if rows == 0:
            raise ValueError("the loader's first batch has 0 examples: it sets the batch size, so it needs some")
        self._leaves = [PooledLeaf(leaf, device) for leaf in leaves]
        row_bytes = sum(leaf.row_bytes for leaf in self._leaves)
        bound = bound or Bound(DEFAULT_BATCHES * rows, DEFAULT_BYTES)
        capacity = bound.items if bound.items is not None else 1 << 31
        if bound.num_bytes is not None:
            capacity = min(capacity, max(bound.num_bytes // (row_bytes + SLOT_BYTES) - rows, rows))
        if capacity < rows or (bound.num_bytes is not None and bound.num_bytes < rows * row_bytes):
            raise bound.too_small(rows, rows * row_bytes)
        self.capacity = capacity
        self.num_slots = capacity + rows
        self.num_bytes = self.num_slots * row_bytes
        try:
            for leaf in self._leaves:
                leaf.allocate(self.num_slots)
        except RuntimeError as error:
            raise ValueError(
                f"buffer: {self.num_slots} examples of {row_bytes} bytes cannot be allocated, "
                f"{self.num_slots * row_bytes} bytes in all. Ask for a smaller buffer"
            ) from error
        self.is_staged = all(leaf.is_on_cpu for leaf in self._leaves)
        """Whether another thread may put rows: only on the CPU, a device orders its copies by stream."""

    def prepare(self, batch: Any) -> Prepared:
        """Take `batch` apart. Raises TypeError if it is not like the first one."""
        leaves, structure = flatten(batch)
        paths = structure.paths
        if not structure.is_like(self.structure):
            raise CannotPoolError(
                f"the loader yields batches of different structures: first {self.structure.paths}, "
                f"now {paths} ({type(batch).__name__}). Make them alike; {_INSTEAD}"
            )
        rows = count_rows(leaves, paths)
        for pool, path, leaf in zip(self._leaves, paths, leaves, strict=True):
            if (found := pool.describe(leaf)) != pool.description:
                raise CannotPoolError(
                    f"the loader yields batches whose leaf {path or 'itself'} changes: first "
                    f"{pool.description}, now {found} a row. Pad them alike; {_INSTEAD}"
                )
        return Prepared(rows, rows, leaves)

    def excess(self, size: int, num_live: int) -> int:
        """Rows that would have to leave before `size` more fit."""
        return max(0, num_live + size - self.capacity)

    def put(self, slots: IntArray, prepared: Prepared) -> None:
        """Copy the rows into `slots`."""
        for pool, leaf in zip(self._leaves, prepared.content, strict=True):
            pool.put(slots, leaf)

    def take(self, slots: IntArray) -> Any:
        """A batch of the rows in `slots`, gathered into new memory."""
        return self.structure.build([leaf.take(slots) for leaf in self._leaves])

    def free(self, slots: IntArray) -> None:
        """Rows are simply written over."""

    def save(self, slots: IntArray) -> dict[str, Any]:
        """Leaf paths, and for each leaf one tensor with the rows of `slots`."""
        paths = self.structure.paths
        return {"paths": paths, "leaves": _to_plain([leaf.take(slots) for leaf in self._leaves], paths)}

    def restore(self, slots: IntArray, state: dict[str, Any], example: Any) -> None:  # noqa: ARG002
        """Put saved rows back. Raises ValueError if paths, dtypes or shapes are not those of this pool."""
        _check_paths(state["paths"], self.structure.paths)
        leaves = []
        for pool, path, saved in zip(self._leaves, self.structure.paths, state["leaves"], strict=True):
            leaf = pool.from_saved(saved)
            if (found := pool.describe(leaf)) != pool.description:
                raise ValueError(_changed_leaf(path, f"{found} a row", pool.description))
            leaves.append(leaf)
        self.put(slots, Prepared(len(slots), len(slots), leaves))


class BatchList:
    """Whole batches of any type, bounded in number, or in the bytes of their tensors, arrays and strings.

    Args:
        batch: the first batch.
        bound: None for 64 batches, at most 1 GiB.
        device: tensors are moved there on admission; they stay where they are when None.
        copy: hand out copies, so that a step may change its batch in place.

    Raises ValueError when the bound is below one batch.
    """

    batch_size = 1
    is_staged = False
    is_fixed = False

    def __init__(self, batch: Any, bound: Bound | None, device: torch.device | None, *, copy: bool) -> None:
        self._bound = bound or Bound(DEFAULT_BATCHES, DEFAULT_BYTES)
        self._device = device
        self._copy = copy
        self._description = describe(batch)
        self._structure = flatten(batch)[1]
        self._batches: dict[int, tuple[Any, int]] = {}
        self.num_slots = DEFAULT_BATCHES
        self.num_bytes = 0
        self.prepare(batch)

    def prepare(self, batch: Any) -> Prepared:
        """Measure `batch`.

        Raises TypeError if its containers are not those of the first batch, ValueError if it is above the
        bound by itself.
        """
        if (found := describe(batch)) != self._description:
            raise CannotPoolError(
                f"the loader yields batches of different structures: first {self._description}, now {found}. "
                "Make them alike"
            )
        size = count_bytes(batch)
        if self._bound.num_bytes is not None and size > self._bound.num_bytes:
            raise self._bound.too_small(1, size)
        return Prepared(1, size, batch)

    def excess(self, size: int, num_live: int) -> int:
        """Whether a batch would have to leave (1) before one of `size` bytes fits (0)."""
        items, num_bytes = self._bound.items, self._bound.num_bytes
        full = items is not None and num_live >= items
        return int(full or (num_bytes is not None and self.num_bytes + size > num_bytes))

    def put(self, slots: IntArray, prepared: Prepared) -> None:
        """Keep the batch under its slot."""
        batch = prepared.content if self._device is None else move(prepared.content, self._device)
        self._batches[int(slots[0])] = (batch, prepared.size)
        self.num_bytes += prepared.size

    def take(self, slots: IntArray) -> Any:
        """The batch in the slot. Its last use is a copy too: the loader may hand out the same batch again."""
        batch = self._batches[int(slots[0])][0]
        if not self._copy:
            return batch
        try:
            return clone(batch)
        except Exception as error:
            raise TypeError(
                f"a batch of type {type(batch).__name__} cannot be copied ({error}): give its class a clone() "
                "method, or use copy=False and leave batches as they are"
            ) from error

    def free(self, slots: IntArray) -> None:
        """Drop the batches in `slots`."""
        for slot in slots.tolist():
            self.num_bytes -= self._batches.pop(slot)[1]

    def save(self, slots: IntArray) -> dict[str, Any]:
        """Leaf paths, and the leaves of each batch."""
        paths = self._structure.paths
        saved = []
        for slot in slots.tolist():
            leaves, structure = flatten(self._batches[slot][0])
            if structure.paths != paths:
                raise TypeError(
                    f"state: a batch in the buffer has leaves {structure.paths}, another has {paths}; buffers "
                    "are saved only where all batches have the same leaves. " + _LEAVE_OUT
                )
            saved.append(clone(_to_plain(leaves, paths)))
        return {"paths": paths, "leaves": saved}

    def restore(self, slots: IntArray, state: dict[str, Any], example: Any) -> None:
        """Put saved batches back, in the types of `example`, one of the loader's batches.

        Raises ValueError if paths or dtypes are not those of the example.
        """
        examples = flatten(example)[0]
        paths = self._structure.paths
        _check_paths(state["paths"], paths)
        for slot, saved in zip(slots, state["leaves"], strict=True):
            leaves = [revive(leaf, like) for leaf, like in zip(clone(saved), examples, strict=True)]
            for path, leaf, like in zip(paths, leaves, examples, strict=True):
                if (was := _kind(leaf)) != (now := _kind(like)):
                    raise ValueError(_changed_leaf(path, was, now))
            self.put(np.array([slot]), self.prepare(self._structure.build(leaves)))


Buffer = TensorPool | BatchList


class CannotPoolError(TypeError):
    """A batch that cannot be taken apart into rows of a pool, or not into rows like those of the first one."""


def count_rows(leaves: Sequence[Any], paths: Sequence[str]) -> int:
    """The common first dimension of a batch's leaves. Raises CannotPoolError if there is none."""
    if not leaves:
        raise CannotPoolError(f"a batch without any tensor cannot be taken apart into examples; {_INSTEAD}")
    for leaf, path in zip(leaves, paths, strict=True):
        problem = why_not_rows(leaf)
        if not problem and len(leaf) != len(leaves[0]):
            problem = f"has {len(leaf)} rows where {paths[0]} has {len(leaves[0])}"
        if problem:
            raise CannotPoolError(
                f"the batch cannot be taken apart into examples: its leaf {path or 'itself'} {problem}; "
                f"expected tensors or arrays with one common first dimension. {_INSTEAD}"
            )
    return len(leaves[0])


def _to_plain(leaves: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    pairs = zip(leaves, paths, strict=True)
    return [to_plain(leaf, f"state: the buffer's leaf {path or 'itself'}", _LEAVE_OUT) for leaf, path in pairs]


def _kind(leaf: Any) -> str:
    """Type and dtype."""
    return f"{type(leaf).__name__} of {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _changed_leaf(path: str, saved: str, found: str) -> str:
    return f"state: the buffer's leaf {path or 'itself'} was saved with {saved}, the loader's batches have {found}"


def _check_paths(saved: Sequence[str], found: Sequence[str]) -> None:
    if list(saved) != list(found):
        raise ValueError(f"state: the buffer was saved with leaves {saved}, the loader's batches have {found}")
