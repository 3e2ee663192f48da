"""Passes through a block: what its graph keeps, what is stored, and blocks that write to their input."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from stretto.tree import UNCHANGEABLE, flatten, map_tensors


@dataclass(slots=True)
class Graph:
    """The ends of an autograd graph."""

    input_gradients: list[torch.Tensor | None]
    """Filled by the backward; one for each leaf of the input."""
    outputs: list[torch.Tensor | None] = field(default_factory=list)
    """The leaves of the output that a gradient can enter."""
    loss: torch.Tensor | None = None
    """On the last block, where the backward starts from it."""


class _Catch(torch.autograd.Function):
    """Passes a tensor on, and puts its gradient aside as it comes.

    A leaf's own `.grad` would be brought into the leaf's memory format, which may change the bits of what the block
    before computes from it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, caught: list[torch.Tensor | None], at: int) -> torch.Tensor:
        ctx.caught, ctx.at = caught, at
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.caught[ctx.at] = gradients[0]
        return None, None, None


def track(value: Any) -> tuple[Any, Graph]:
    """`value` with its tensors that require a gradient at the beginning of a new graph."""
    leaves, structure = flatten(value)
    graph = Graph([None] * len(leaves))
    tracked = [
        _Catch.apply(leaf.detach().requires_grad_(), graph.input_gradients, at)  # type: ignore[no-untyped-call]
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        else leaf
        for at, leaf in enumerate(leaves)
    ]
    return structure.build(tracked), graph


def release(value: Any, *, runs_again: bool) -> Any:
    """`value` without its graph. Each tensor says whether a gradient may come back, or all floating ones do.

    The latter where a pass without a graph made it, which `runs_again` with one.
    """

    def let_go(tensor: torch.Tensor) -> torch.Tensor:
        is_trained = tensor.is_floating_point() or tensor.is_complex() if runs_again else tensor.requires_grad
        return tensor.detach().requires_grad_(is_trained)

    return map_tensors(let_go, value)


def run_and_watch(call: Callable[[Any], Any], value: Any, writes: bool | None) -> tuple[Any, bool]:
    """`call(value)` without a change of `value`, and whether `call` writes to what it gets.

    The first time (`writes` is None) it gets copies, and their version counters and values tell.
    """
    leaves, structure = flatten(value)
    given = [_copy_of(leaf, writes is not False) for leaf in leaves]
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    output = call(structure.build(given))
    written = any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True))
    if writes is None:  # what is written through .data or NumPy is not counted
        written = written or not all(map(_are_alike, given, leaves))
    if writes is False and written:
        raise RuntimeError(
            "the block wrote to its input, which it did not do on its first batch: stored inputs must not change. "
            "Write to a copy, or always in place"
        )
    return output, bool(writes) or written


def _copy_of(leaf: Any, may_be_written: bool) -> Any:
    """A copy of a leaf that a block may write to: of a tensor only if this block is not known not to."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone() if may_be_written else leaf
    return leaf if type(leaf) in UNCHANGEABLE else copy.deepcopy(leaf)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two leaves have the same bits, where they are tensors."""
    if not isinstance(one, torch.Tensor):
        return True
    first, second = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def foreign_parameter(ends: Iterable[torch.Tensor | None], own: Iterable[torch.Tensor]) -> nn.Parameter | None:
    """A parameter that is none of `own` and would get a gradient from the graph that `ends` end; None if none."""
    known = {id(tensor) for tensor in own}
    rest = [end.grad_fn for end in ends if end is not None and end.grad_fn is not None]
    seen = set(rest)
    while rest:
        node = rest.pop()
        if node.name().endswith("AccumulateGrad"):
            parameter = node.variable  # type: ignore[attr-defined]
            if isinstance(parameter, nn.Parameter) and id(parameter) not in known:
                return parameter
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                rest.append(behind)
    return None


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Afterwards `module` has the buffers it had, none that a pass made, and None where it filled one in."""
    found = [(part, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for part, buffers in found:
            part._buffers.clear()
            part._buffers.update(buffers)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """All parts of `module` in eval mode, then each in its own again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def trains_always(module: nn.Module) -> str | None:
    """An operation of `module` that `eval()` does not reach, such as "aten.dropout.default"; None if all obey it.

    Graphs made by torch.export, as are the stages of torch's `pipeline()`, hold dropout and batch norm as
    operations whose mode is a constant.
    """
    graphs = [getattr(part, "graph", None) for part in module.modules()]
    nodes = [node for graph in graphs if isinstance(graph, fx.Graph) for node in graph.nodes]
    for node in nodes:
        if not isinstance(node.target, OpOverload):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        is_training = given.get("train") or given.get("training")
        probability = given.get("p", given.get("dropout", 1))
        without_statistics = "running_mean" in given and given["running_mean"] is None
        if (is_training and probability != 0 and not without_statistics) or given.get("dropout_p"):
            return str(node.target)
    return None
