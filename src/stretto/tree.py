"""Batches as trees: taking any nesting apart into leaves and building the same types again.

torch's pytree knows dict, list, tuple, NamedTuple and what is registered with it (dataclasses, say). Mapping
classes it does not know (UserDict, Hugging Face's BatchEncoding, a dict subclass) are taken apart by key and
rebuilt in their type. Everything else is a leaf.
"""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


@dataclass(slots=True, eq=False)
class Structure:
    """The shape of a tree without its leaves."""

    spec: pytree.TreeSpec
    mappings: dict[int, tuple[Any, "Structure"]]
    """Children of `spec` that are mappings unknown to pytree: an emptied copy and the structure inside."""
    paths: list[str]
    """Where each leaf stands, such as "[0]['image']"."""

    def is_like(self, other: "Structure") -> bool:
        """Whether both have the same containers, types and keys."""
        if self.spec != other.spec or self.mappings.keys() != other.mappings.keys():
            return False
        pairs = [(self.mappings[at], other.mappings[at]) for at in self.mappings]
        return all(type(a) is type(b) and mine.is_like(theirs) for (a, mine), (b, theirs) in pairs)

    def build(self, leaves: list[Any]) -> Any:
        """The tree of this structure with `leaves`, in the order of `paths`."""
        if not self.mappings:
            return pytree.tree_unflatten(leaves, self.spec)
        rest = iter(leaves)
        children: list[Any] = []
        for at in range(self.spec.num_leaves):
            if at in self.mappings:
                shell, inner = self.mappings[at]
                content = inner.build([next(rest) for _ in inner.paths])
                children.append(_fill(shell, content))
            else:
                children.append(next(rest))
        return pytree.tree_unflatten(children, self.spec)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Take `tree` apart: its leaves, and the structure that builds it again."""
    try:
        pairs, spec = pytree.tree_flatten_with_path(tree)
    except ValueError:  # a class registered without the names of its children
        children, spec = pytree.tree_flatten(tree)
        pairs = [((pytree.SequenceKey(at),), child) for at, child in enumerate(children)]
    leaves: list[Any] = []
    paths: list[str] = []
    mappings: dict[int, tuple[Any, Structure]] = {}
    for at, (path, child) in enumerate(pairs):
        where = pytree.keystr(path)
        if isinstance(child, Mapping):
            inner_leaves, inner = flatten(dict(child))
            mappings[at] = (_fill(child, dict.fromkeys(child)), inner)
            leaves += inner_leaves
            paths += [where + inside for inside in inner.paths]
        else:
            leaves.append(child)
            paths.append(where)
    return leaves, Structure(spec, mappings, paths)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The leaves of `tree` that are tensors."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with what `function` makes of each tensor in its place."""
    leaves, structure = flatten(tree)
    return structure.build([function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


UNCHANGEABLE = {int, float, bool, complex, str, bytes, type(None)}
"""Types of leaves that nobody can change in place."""


def clone(tree: Any) -> Any:
    """A copy that shares no memory with `tree`, all types kept."""
    kind = type(tree)
    if kind in UNCHANGEABLE:
        return tree
    if kind is torch.Tensor and not tree.requires_grad:
        return tree.clone()
    if kind is np.ndarray and not tree.dtype.hasobject:
        return tree.copy()
    if kind in (tuple, list):  # as what follows does, at a fifth of the time
        return kind([clone(part) for part in tree])
    if kind is dict:
        return {key: clone(part) for key, part in tree.items()}
    leaves, structure = flatten(tree)
    return structure.build([_clone_leaf(leaf) for leaf in leaves])


def count_bytes(tree: Any) -> int:
    """Bytes of the tensors, arrays and strings in `tree`, also of those in the attributes of custom objects."""
    total = 0
    seen: set[int] = set()
    rest = [tree]
    while rest:
        for leaf in pytree.tree_leaves(rest.pop()):
            if isinstance(leaf, torch.Tensor):
                total += _tensor_bytes(leaf, seen)
            elif isinstance(leaf, np.ndarray):
                total += leaf.nbytes
            elif isinstance(leaf, str | bytes | bytearray):
                total += len(leaf)
            elif _is_picture(leaf):
                width, height = leaf.size
                total += width * height * _PIXEL_BYTES.get(leaf.mode, 4)
            elif isinstance(leaf, Mapping):
                rest.append(dict(leaf))
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type) and id(leaf) not in seen:
                seen.add(id(leaf))
                rest.append(dict(vars(leaf)))
    return total


_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2}  # of the other modes 4, also of RGB


def _is_picture(leaf: Any) -> bool:
    """Whether it is one of Pillow's, which is not imported for that."""
    return hasattr(leaf, "getbands") and hasattr(leaf, "mode")


def _tensor_bytes(tensor: torch.Tensor, seen: set[int]) -> int:
    """Bytes that a tensor keeps alive: of its whole storage, counted once."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
        index_bytes = 8 * (tensor.sparse_dim() if tensor.layout is torch.sparse_coo else 1)
        return values.nbytes + index_bytes * values.shape[0]
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def describe(tree: Any) -> str:
    """The containers of `tree` down to lists and leaves, such as "{'image': ., 'target': (., list)}".

    The length of a list is left out: it often counts the examples.
    """
    if isinstance(tree, Mapping):
        inside = ", ".join(f"{key!r}: {describe(value)}" for key, value in tree.items())
        return f"{'' if type(tree) is dict else type(tree).__name__}{{{inside}}}"
    if isinstance(tree, tuple):
        name = type(tree).__name__ if hasattr(tree, "_fields") else ""
        return f"{name}({', '.join(describe(value) for value in tree)})"
    return "list" if isinstance(tree, list) else "."


def _clone_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        copied = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        vars(copied).update(vars(leaf))
        return copied
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.copy()
    if hasattr(leaf, "clone"):  # batch classes with a cheaper copy of their own, such as PyG's Data
        return leaf.clone()
    if _is_picture(leaf):
        return leaf.copy()
    return copy.deepcopy(leaf)


def revive(saved: Any, like: Any) -> Any:
    """A leaf from a state, where it is a plain tensor or number, with the type and device of the leaf `like`."""
    if isinstance(like, torch.Tensor) and isinstance(saved, torch.Tensor):
        tensor = saved.to(like.device).as_subclass(type(like))
        vars(tensor).update(vars(like))
        return tensor
    if isinstance(like, np.ndarray) and isinstance(saved, torch.Tensor):
        return saved.numpy()
    return type(like)(saved) if isinstance(like, np.generic) else saved


def _fill(shell: Any, content: dict[Any, Any]) -> Any:
    """A copy of the mapping `shell` (its type and attributes) that holds `content` under its keys."""
    if not isinstance(shell, MutableMapping):
        return type(shell)(content)
    filled = copy.copy(shell)
    for key, value in content.items():
        filled[key] = value
    return filled


def move(tree: Any, device: torch.device) -> Any:
    """`tree` with its tensors on `device`; objects with a `to` method (custom batches) are asked to move."""
    leaves, structure = flatten(tree)
    return structure.build([_move_leaf(leaf, device) for leaf in leaves])


def _move_leaf(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device) if hasattr(leaf, "to") else leaf
