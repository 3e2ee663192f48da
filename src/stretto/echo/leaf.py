"""One leaf of a batch as rows of a preallocated tensor."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.echo.plan import IntArray


def why_not_rows(leaf: Any) -> str:
    """Why `leaf` is not a stack of rows; empty if it is."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            return f"is a tensor of layout {leaf.layout}" if not leaf.is_nested else "is a nested tensor"
    elif isinstance(leaf, np.ndarray):
        if leaf.dtype.hasobject:
            return "is an array of Python objects"
    else:
        advice = ""
        if dataclasses.is_dataclass(leaf):
            advice = " (a dataclass is taken apart once torch.utils._pytree.register_dataclass knows it)"
        return f"is {leaf!r:.40} of type {type(leaf).__name__}{advice}"
    return "" if leaf.ndim else "has no dimension"


class PooledLeaf:
    """Storage for the rows of one leaf; what comes out has the type and memory format of what went in.

    NumPy arrays are kept as rows of bytes, so any dtype without objects works. On the CPU rows go in and out
    through a NumPy view of their bytes: `index_copy_` on uint8 is ten times slower, and `index_select` asks for
    all of torch's threads, which makes it ten times slower whenever a loader's worker has one of their cores.
    Both copies release the GIL, so that the training step and the thread that fetches go on meanwhile.
    """

    def __init__(self, example: Any, device: torch.device | None) -> None:
        self.is_array = isinstance(example, np.ndarray)
        self._class = type(example)
        self._attributes = dict(getattr(example, "__dict__", {}))
        self._dtype = example.dtype
        self._shape = tuple(example.shape[1:])
        self.description = self.describe(example)
        rows = self._as_tensor(example)
        self._device = rows.device if device is None or self.is_array else device
        self._pin = rows.is_pinned()
        # The dimensions in memory order, so that channels_last and the like come out as they went in.
        strides = rows.stride()
        self._order = [0, *sorted(range(1, rows.ndim), key=lambda d: -strides[d])]
        self._inverse = [self._order.index(d) for d in range(rows.ndim)]
        self._row_shape = rows.permute(self._order).shape[1:]
        self.row_bytes = rows.dtype.itemsize * self._row_shape.numel()
        self.is_on_cpu = self._device.type == "cpu"
        self._tensor_dtype = rows.dtype

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows."""
        shape = (num_slots, *self._row_shape)
        self._pool = torch.empty(shape, dtype=self._tensor_dtype, device=self._device)
        if self.is_on_cpu:
            self._rows = _as_bytes(self._pool)

    def describe(self, leaf: Any) -> str:
        """What has to be equal in all batches: type, dtype, and the shape of a row."""
        return f"{type(leaf).__name__} of {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}"

    def put(self, slots: IntArray, leaf: Any) -> None:
        """Copy rows into `slots`."""
        rows = self._as_tensor(leaf).permute(self._order)
        if not self.is_on_cpu:
            index = torch.from_numpy(slots.astype(np.int64))
            self._pool.index_copy_(
                0, index.to(self._device, non_blocking=True), rows.to(self._device, non_blocking=True)
            )
        else:
            self._rows[slots] = _as_bytes(rows.cpu().contiguous())

    def take(self, slots: IntArray) -> Any:
        """The rows of `slots` in new memory."""
        if self.is_on_cpu:
            rows = torch.empty(len(slots) * self.row_bytes, dtype=torch.uint8, pin_memory=self._pin)
            as_bytes = rows.numpy().reshape(len(slots), self.row_bytes)
            self._rows.take(slots, 0, as_bytes, "clip")  # "raise" would copy twice
            rows = rows.view(self._tensor_dtype).view(len(slots), *self._row_shape)
        else:
            index = torch.from_numpy(slots).to(self._device, non_blocking=True)
            rows = torch.index_select(self._pool, 0, index)
        if self.is_array:
            return rows.numpy().view(self._dtype).reshape(len(slots), *self._shape)
        rows = rows.permute(self._inverse)
        if self._class is not torch.Tensor:
            rows = rows.as_subclass(self._class)
            rows.__dict__.update(self._attributes)
        return rows

    def from_saved(self, saved: torch.Tensor) -> Any:
        """A leaf as it was before it went into a state of plain tensors."""
        return saved.numpy() if self.is_array else saved.as_subclass(self._class)

    def _as_tensor(self, leaf: Any) -> torch.Tensor:
        if self.is_array:
            rows = np.ascontiguousarray(leaf).reshape(len(leaf), math.prod(self._shape)).view(np.uint8)
            return torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        return leaf.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()  # type: ignore[no-any-return]


def _as_bytes(rows: torch.Tensor) -> NDArray[np.uint8]:
    """A view of contiguous CPU rows, shape [rows, bytes of a row]."""
    row_bytes = rows.dtype.itemsize * rows.shape[1:].numel()
    as_bytes: NDArray[np.uint8] = rows.unsqueeze(-1).view(torch.uint8).numpy()
    return as_bytes.reshape(len(rows), row_bytes)
