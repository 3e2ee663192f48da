"""What passes between two blocks: a tree whose tensors are described, and the tensors, flat.

A message is a tree of any nesting. Its tensors travel in the order of their storage where they are dense in it
(channels_last, say), else made contiguous, and arrive with the shape and strides they left with. Everything else
(numbers, strings, None) travels in the description. The simulator passes its boundaries through the same codec, so
that both see the same tensors.
"""

import copyreg
import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stretto.tree import UNCHANGEABLE, Structure, flatten


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What stands for a tensor in a description: all that is needed to receive it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    is_cpu: bool
    """Whether it stays in the host's memory; others go to the next block's device."""

    @property
    def num_elements(self) -> int:
        """Elements under way."""
        return torch.Size(self.shape).numel()

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor whose elements `flat` [num_elements] holds in storage order."""
        return flat.as_strided(self.shape, self.strides).requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class Description:
    """A tree without its tensors, and without an object of a class whose fields have to be tensors."""

    structure: Structure
    leaves: tuple[Any, ...]
    """A `TensorShape` for every tensor, everything else itself."""

    @property
    def shapes(self) -> list[TensorShape]:
        """The tensors to come, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorShape)]


_LEAF = pytree.tree_structure(0)
if type(_LEAF) is not pytree.TreeSpec:  # torch's own warns when it is unpickled
    copyreg.pickle(type(_LEAF), lambda _: (pytree.tree_structure, (0,)))


def encode(tree: Any, held: Iterable[torch.Tensor] = ()) -> tuple[Description, list[torch.Tensor]]:
    """Describe `tree`, a `TensorShape` for each tensor, and give the tensors, flat, without a copy if dense.

    Tensors that share memory with one of `held` (weights and buffers, which the next update changes) are copied.
    Subclasses of torch.Tensor become plain tensors.

    Raises TypeError for sparse, quantized and nested tensors, for objects that hold tensors, and for what cannot be
    pickled, naming the place in `tree`.
    """
    leaves, structure = flatten(tree)
    held_memory = {tensor.untyped_storage().data_ptr() for tensor in held}
    described: list[Any] = []
    flat: list[torch.Tensor] = []
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) not in UNCHANGEABLE:
                _check_object(leaf, path or "what")
            described.append(leaf)
            continue
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            raise TypeError(
                f"the tensor at {path or 'the root'} of what passes between two blocks is {leaf.layout}, "
                f"{leaf.dtype}: expected a dense one. Pass its parts (indices and values, say)"
            )
        tensor = leaf.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        if tensor.untyped_storage().data_ptr() in held_memory:
            tensor = tensor.clone()
        described.append(
            TensorShape(tensor.dtype, tuple(tensor.shape), tensor.stride(), leaf.requires_grad, tensor.is_cpu)
        )
        flat.append(tensor.as_strided((tensor.numel(),), (1,)))
    return Description(structure, tuple(described)), flat


def decode(description: Description, flat: Sequence[torch.Tensor]) -> Any:
    """Build the tree again from tensors that nobody else writes to."""
    rest = iter(flat)
    leaves = [leaf.restore(next(rest)) if isinstance(leaf, TensorShape) else leaf for leaf in description.leaves]
    return description.structure.build(leaves)


def pass_on(tree: Any) -> Any:
    """`tree` as it arrives in another process: the same values in memory of their own."""
    description, flat = encode(tree)
    leaves = [
        leaf if isinstance(leaf, TensorShape) or type(leaf) in UNCHANGEABLE else pickle.loads(pickle.dumps(leaf))
        for leaf in description.leaves
    ]
    return decode(replace(description, leaves=tuple(leaves)), [tensor.clone() for tensor in flat])


class _Pickler(pickle.Pickler):
    """Notices tensors, however deep they lie in an object."""

    found_tensor = False

    def persistent_id(self, part: Any) -> None:
        self.found_tensor = self.found_tensor or isinstance(part, torch.Tensor)


def _check_object(leaf: Any, path: str) -> None:
    """Raise TypeError for an object of a class that is no container known here, if it holds tensors."""
    pickler = _Pickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(leaf)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{path} passes between two blocks as a {type(leaf).__name__}, which cannot be pickled: {error}"
        ) from error
    if pickler.found_tensor:
        raise TypeError(
            f"{path} passes between two blocks as a {type(leaf).__name__}, and the tensors it holds would get no "
            "gradient: pass tuples, lists and dicts, or register the class with torch.utils._pytree"
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
