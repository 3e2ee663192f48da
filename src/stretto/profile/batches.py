"""What a loader is, and what its batches are: sizes, and whether one comes twice."""

import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from stretto.echo.buffer import count_rows
from stretto.echo.dataloader import EchoDataLoader
from stretto.echo.factor import Factor
from stretto.echo.loader import EchoLoader
from stretto.echo.settings import loader_length
from stretto.tree import clone, count_bytes, flatten

_SAMPLE = 64  # values of a leaf that are hashed
_LEAVES = 2  # of a batch
_ALWAYS = 4  # fetches of an iteration that are hashed
_EVERY = 64  # then two in a row of so many


def describe_loader(loader: Any) -> dict[str, Any]:
    """Its class, data set and settings, as far as it has them."""
    dataset = getattr(loader, "dataset", None)
    inner = getattr(dataset, "dataset", None) if type(dataset).__module__.startswith("stretto.") else None
    return {
        "name": type(loader).__name__,
        "dataset": type(inner if inner is not None else dataset).__name__ if dataset is not None else "",
        "is_map_style": not isinstance(dataset, IterableDataset) and hasattr(type(dataset), "__getitem__"),
        "num_workers": getattr(loader, "num_workers", 0),
        "prefetch_factor": getattr(loader, "prefetch_factor", None),
        "pin_memory": bool(getattr(loader, "pin_memory", False)),
        "persistent_workers": bool(getattr(loader, "persistent_workers", False)),
        "length": loader_length(loader),
        "num_examples": loader_length(dataset),
    }


def echo_reader(loader: Any) -> Callable[[], dict[str, Any] | None] | None:
    """What tells how a loader that echoes by itself does so, without keeping it alive; None for any other one."""
    if not isinstance(loader, EchoLoader | EchoDataLoader):
        return None
    reference = weakref.ref(loader)
    unit, factor = ("workers", loader.factor) if isinstance(loader, EchoDataLoader) else loader.unit_and_factor

    def read() -> dict[str, Any] | None:
        alive = reference()
        return None if alive is None else describe_echo(alive, unit, factor, 0)

    return read


def describe_echo(
    loader: EchoLoader | EchoDataLoader, unit: str, factor: Factor, began_at_update: int
) -> dict[str, Any]:
    """An EchoRecord (schema.py)."""
    stats = loader.stats()
    return {
        "unit": unit,
        "factor": factor,
        "realised": stats.factor,
        "uses": stats.uses,
        "fresh_items": stats.fresh_items,
        "fresh_batches": stats.fresh_batches,
        "dropped_uses": stats.dropped_uses,
        "buffer_bytes": stats.buffer_bytes,
        "began_at_update": began_at_update,
    }


def look_at(batch: Any) -> dict[str, Any]:
    """Examples and bytes of a batch, its leaves' shapes, and why it cannot be taken apart (None if it can)."""
    try:
        return _look_at(batch)
    except Exception as error:  # a class of the script's that does not like to be looked at
        return {
            "num_examples": None,
            "num_bytes": None,
            "shapes": [],
            "why_not": f"{type(batch).__name__}: {error}",
        }


def _look_at(batch: Any) -> dict[str, Any]:
    leaves, structure = flatten(batch)
    why_not = None
    try:
        num_examples: int | None = count_rows(leaves, structure.paths)
    except TypeError as error:
        num_examples, why_not = _first_length(leaves), str(error)
        clone(batch)  # whole batches are kept as copies: raises if there can be none
    shapes = [
        [str(getattr(leaf, "dtype", type(leaf).__name__)), *getattr(leaf, "shape", ())[1:]] for leaf in leaves
    ]
    return {"num_examples": num_examples, "num_bytes": count_bytes(batch), "shapes": shapes, "why_not": why_not}


def can_be_pooled(looks: list[dict[str, Any]]) -> bool:
    """Whether batches that were looked at can be taken apart into examples, all of one shape."""
    return bool(looks) and all(look["why_not"] is None and look["shapes"] == looks[0]["shapes"] for look in looks)


def _first_length(leaves: list[Any]) -> int | None:
    for leaf in leaves:
        if getattr(leaf, "ndim", 0):
            return len(leaf)
    return None


@dataclass(slots=True)
class Repeats:
    """Batches that were served again although nothing asked for it."""

    num_seen: int = 0
    num_repeated: int = 0
    num_in_a_row: int = 0
    _iteration: int = -1
    _at: int = 0
    _seen: set[bytes] = field(default_factory=set)
    _last: bytes = b""

    def see(self, batch: Any, iteration: int) -> None:
        """Compare with the batches before it in the same iteration; cheap, and never on an accelerator."""
        if iteration != self._iteration:
            self._iteration, self._at, self._last = iteration, 0, b""
            self._seen.clear()
        self._at += 1
        if self._at > _ALWAYS and self._at % _EVERY > 1:
            return
        digest = digest_of(batch)
        if digest is None:
            return
        self.num_seen += 1
        self.num_repeated += digest in self._seen
        self.num_in_a_row += digest == self._last
        self._last = digest
        if len(self._seen) < 1 << 16:
            self._seen.add(digest)

    def findings(self) -> list[str]:
        """Sentences for the user."""
        if self.num_repeated < 2 or self.num_repeated < 0.01 * self.num_seen:
            return []
        how = "in a row " if self.num_in_a_row > self.num_repeated / 2 else ""
        return [
            f"{self.num_repeated} of {self.num_seen} batches looked at had been served before {how}in the same "
            "epoch, though no echo was asked for: look for a sampler that repeats indices, workers of an iterable "
            "data set that all read everything, or a cache of batches"
        ]


def digest_of(batch: Any) -> bytes | None:
    """A hash of some of the batch's numbers; None if it has none on the CPU, or all are the same."""
    digest = hashlib.blake2b(digest_size=8)
    varies = False
    leaves, _ = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    for leaf in leaves[:_LEAVES]:
        array = _array_of(leaf)
        if array is None or not array.size:
            continue
        data = array.flat[:: max(1, array.size // _SAMPLE)].tobytes()
        varies |= data.count(data[: array.itemsize]) * array.itemsize < len(data)
        digest.update(data)
    return digest.digest() if varies else None


def _array_of(leaf: Any) -> NDArray[Any] | None:
    """The numbers of a leaf where they are, without torch's operations, each of which costs more than the hash."""
    if isinstance(leaf, np.ndarray):
        return None if leaf.dtype == object else leaf
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or leaf.layout != torch.strided:
        return None
    if leaf.requires_grad:
        leaf = leaf.detach()
    array: NDArray[Any] = (leaf.view(torch.int16) if leaf.dtype == torch.bfloat16 else leaf).numpy()
    return array
