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
from dataclasses import dataclass
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
class Pickled:
    """What stands for an object of a class that is no container known here."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """A tree without its tensors, and without an object of a class whose fields have to be tensors."""

    structure: Structure
    leaves: tuple[Any, ...]
    """A `TensorShape` for every tensor, a `Pickled` for what may change, everything else itself."""

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
            described.append(leaf if type(leaf) in UNCHANGEABLE else _pickle(leaf, path or "what"))
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

    def arrived(leaf: Any) -> Any:
        if isinstance(leaf, TensorShape):
            return leaf.restore(next(rest))
        return pickle.loads(leaf.data) if isinstance(leaf, Pickled) else leaf

    return description.structure.build([arrived(leaf) for leaf in description.leaves])


def pass_on(tree: Any) -> Any:
    """`tree` as it arrives in another process: the same values in memory of their own."""
    description, flat = encode(tree)
    return decode(description, [tensor.clone() for tensor in flat])


class _Pickler(pickle.Pickler):
    """Notices tensors, however deep they lie in an object."""

    found_tensor = False

    def persistent_id(self, part: Any) -> None:
        self.found_tensor = self.found_tensor or isinstance(part, torch.Tensor)


def _pickle(leaf: Any, path: str) -> Pickled:
    """What travels of an object that is no container known here. Raises TypeError if it holds tensors."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, pickle.HIGHEST_PROTOCOL)
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
    return Pickled(pickled.getvalue())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
