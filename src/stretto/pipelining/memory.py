"""What each block of a split model holds in memory, counted from one batch.

With (p; m) a block has one copy of its weights, gradients and optimizer state, m_k + 1 stored inputs, p_k outputs
on their way, and one graph, whatever its staleness. With stashed weights it has m_k + 1 graphs and as many copies
of its weights. GPipe and 1F1B keep the graphs of the micro-batches that are between forward and backward, or, with
checkpointing, their inputs and one graph.

Not counted: what an operation needs while it runs, what the allocator keeps, random states, targets.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.pipelining.events import Microbatching, recomputes
from stretto.pipelining.measure import at_a_cut, run_part
from stretto.pipelining.rng import batch_rng
from stretto.pipelining.spec import Staleness
from stretto.tree import tensors_of

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Bytes of one block's parts, for one batch."""

    weights_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    """Of the parameters that are trained."""
    optimizer_bytes: int
    input_bytes: int
    output_bytes: int
    graph_bytes: int
    """What the graph of a forward keeps for its backward, without the input and the weights."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes that one block holds at its fullest."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    inputs_bytes: int
    outputs_bytes: int
    graphs_bytes: int
    copies_bytes: int
    """Older weights, for backwards that use them."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(astuple(self))


def measure_sizes(
    blocks: Sequence[nn.Module], sample: Any, optimizer: MakeOptimizer | None = None
) -> list[BlockSizes]:
    """Count the parts of blocks that run in a row on the batch `sample`.

    On copies, one block at a time, in training mode: a forward whose saved tensors are counted (each memory once),
    and, if `optimizer` makes one from a list of parameters, a step of it on gradients of 0.

    Raises RuntimeError, with its number, for a block that fails on what it gets.
    """
    sizes, value = [], sample
    with batch_rng(0, 0), torch.enable_grad():
        for index, block in enumerate(blocks):
            part = copy.deepcopy(block).train()
            part.zero_grad()
            given = at_a_cut(value)
            output, graph_bytes = _count_graph(part, given, f"block {index}")
            trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
            sizes.append(
                BlockSizes(
                    weights_bytes=_num_bytes([*part.parameters(), *part.buffers()]),
                    gradients_bytes=_num_bytes(trained),
                    optimizer_bytes=_count_state(optimizer, trained) if optimizer and trained else 0,
                    input_bytes=_num_bytes(tensors_of(value)),
                    output_bytes=_num_bytes(tensors_of(output)),
                    graph_bytes=graph_bytes,
                )
            )
            value = output
    return sizes


def predict_memory(spec: Staleness, sizes: Sequence[BlockSizes]) -> list[BlockMemory]:
    """What each block holds with layer-wise staleness. Raises ValueError for another number of blocks."""
    if len(sizes) != spec.K:
        raise ValueError(f"sizes of {len(sizes)} blocks for {spec}, which has {spec.K}")
    found = []
    for size, age, waiting, is_replayed in zip(sizes, spec.m, spec.p, recomputes(spec), strict=True):
        kept = age > 0 and not is_replayed
        found.append(
            BlockMemory(
                size.weights_bytes,
                size.gradients_bytes,
                size.optimizer_bytes,
                inputs_bytes=(age + 1) * size.input_bytes,
                outputs_bytes=waiting * size.output_bytes,
                graphs_bytes=(age + 1 if kept else 1) * size.graph_bytes,
                copies_bytes=(age + 1) * size.weights_bytes if kept else 0,
            )
        )
    return found


def predict_microbatch_memory(
    kind: Microbatching, sizes: Sequence[BlockSizes], num_microbatches: int, *, checkpoint: bool = False
) -> list[BlockMemory]:
    """What each block holds with GPipe or 1F1B, a micro-batch taking 1/M of a batch's bytes.

    Between forward and backward are all M with GPipe, at most K - k with 1F1B.
    """
    found = []
    for index, size in enumerate(sizes):
        kept = num_microbatches if kind == "gpipe" else min(num_microbatches, len(sizes) - index)
        graphs = 1 if checkpoint else kept
        found.append(
            BlockMemory(
                size.weights_bytes,
                size.gradients_bytes,
                size.optimizer_bytes,
                inputs_bytes=size.input_bytes * kept // num_microbatches,
                outputs_bytes=0,
                graphs_bytes=size.graph_bytes * graphs // num_microbatches,
                copies_bytes=0,
            )
        )
    return found


def _count_graph(part: nn.Module, given: Any, name: str) -> tuple[Any, int]:
    """The output of `part`, and the bytes that its graph keeps beside the weights and the input."""
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage

    entries = [(tensor, tensor._version) for tensor in tensors_of(given)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        output = run_part(part, given, name)
    # A block that writes to its input gets a copy of the stored one, and its graph keeps that.
    unchanged = [tensor for tensor, version in entries if tensor._version == version]
    for tensor in (*part.parameters(), *part.buffers(), *unchanged):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return output, sum(storage.nbytes() for storage in saved.values())


def _count_state(make: MakeOptimizer, trained: list[nn.Parameter]) -> int:
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(trained)
    optimizer.step()
    return _num_bytes(tensor for state in optimizer.state.values() for tensor in tensors_of(state))


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
