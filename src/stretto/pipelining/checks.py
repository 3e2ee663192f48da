"""What is said of blocks, optimizers and values that do not go together."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stretto.pipelining.passes import Graph, foreign_parameter
from stretto.pipelining.repairs import check_can_predict
from stretto.tree import flatten

if TYPE_CHECKING:
    from stretto.pipelining.block import Block


def check_module(block: "Block") -> None:
    """Raise TypeError for a module that cannot be a block."""
    if not isinstance(block.module, torch.nn.Module):
        raise TypeError(f"block {block.index} is {block.module!r:.60}: expected a torch.nn.Module")
    if hasattr(block.module, "_orig_mod"):
        raise TypeError(
            f"block {block.index} came from torch.compile(), which gives its weights other names than the model's: "
            "call block.compile() instead, which compiles in place"
        )
    if not block.keeps_graph and any(isinstance(part, torch.jit.ScriptModule) for part in block.module.modules()):
        raise TypeError(
            f"block {block.index} has a part made by torch.jit, whose buffers cannot be kept as they are while its "
            "input is run through it a second time: give it as a plain module, or backward_params='stashed'"
        )


def check_optimizer(block: "Block") -> None:
    """Raise TypeError or ValueError for an optimizer or a scheduler that cannot train `block`."""
    optimizer, scheduler = block.optimizer, block.lr_scheduler
    if optimizer is None:
        if block.trained():
            raise ValueError(
                f"block {block.index} has parameters to train and no optimizer: give it one, or set "
                "requires_grad=False"
            )
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer of block {block.index} is {optimizer!r:.60}: expected a torch optimizer")
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS computes the loss several times an update, which a pipeline does not: take SGD, AdamW or another"
        )
    check_parameters(optimizer, block.module, f"block {block.index}")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"the lr_scheduler of block {block.index} belongs to another optimizer: make it from the block's own"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs a metric, which a block does not see: step it yourself, on every rank with "
            "the same metric, and give the schedule no lr_scheduler"
        )
    if block.options.repairs.predict and block.m > 0:
        check_can_predict(optimizer)


def check_parameters(optimizer: torch.optim.Optimizer, module: torch.nn.Module, name: str) -> None:
    """Raise ValueError for an optimizer of other parameters than those of `module`, which is called `name`."""
    own = {id(weight) for weight in module.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := [parameter for parameter in given if id(parameter) not in own]:
        raise ValueError(
            f"the optimizer of {name} holds {len(foreign)} of {len(given)} parameters that are not in it, the "
            f"first of shape {tuple(foreign[0].shape)}: each has its own optimizer"
        )


def check_graph(block: "Block", graph: Graph) -> None:
    """Raise RuntimeError if a gradient would get lost, by the `graph` of the first batch."""
    if (found := foreign_parameter([graph.loss, *graph.outputs], block.weights.values())) is not None:
        raise RuntimeError(
            f"block {block.index} or its loss uses a parameter of shape {tuple(found.shape)} that is not among the "
            "block's own, and whose gradient would get lost: a weight belongs to one block. For a penalty on all "
            "weights take the weight_decay of each block's optimizer"
        )
    if graph.loss is not None and not graph.loss.requires_grad and block.trained():
        raise RuntimeError(
            f"the loss of block {block.index} has no graph, so that nothing would be trained: loss_fn must compute "
            "it from the output by differentiable operations, and not under torch.no_grad()"
        )


def check_gradients(block: "Block", n: int, graph: Graph, gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise RuntimeError if the gradients are of another output than the one that the graph ends in."""
    if len(gradients) != len(graph.outputs):
        raise RuntimeError(
            f"block {block.index}: the output of batch {n} had {len(gradients)} leaves at first and "
            f"has {len(graph.outputs)} in the recompute: its structure must depend on the input alone"
        )


def check_loss(loss_fn: Any) -> None:
    """Raise ValueError for a loss function with weights of its own, which no optimizer would train."""
    if isinstance(loss_fn, torch.nn.Module) and any(weight.requires_grad for weight in loss_fn.parameters()):
        raise ValueError(
            f"loss_fn={type(loss_fn).__name__} has weights that no block would train: make them a part of "
            "the last block, or set requires_grad=False"
        )


def advise_nesterov(blocks: "Sequence[Block]") -> None:
    """Warn if a stale block trains with SGD's momentum in its less tolerant form."""
    stale = [block.optimizer for block in blocks if block.m > 0 and isinstance(block.optimizer, SGD)]
    if any(group["momentum"] > 0 and not group["nesterov"] for sgd in stale for group in sgd.param_groups):
        warnings.warn(
            "a block with m > 0 trains with SGD and momentum: nesterov=True tolerates staleness better "
            "(the guide has the figures)",
            stacklevel=3,
        )


def describe_value(value: Any) -> str:
    """Shapes and types of what a block got, for a message."""
    leaves, structure = flatten(value)
    return ", ".join(
        f"{path}: {list(leaf.shape)} {leaf.dtype}".removeprefix(": ")
        if isinstance(leaf, torch.Tensor)
        else f"{path}: {leaf!r:.20}".removeprefix(": ")
        for path, leaf in zip(structure.paths, leaves, strict=True)
    )
