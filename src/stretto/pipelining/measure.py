"""How long the parts of a model take, measured on copies: state, mode and random numbers stay as they are."""

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stretto.pipelining.checks import describe_value
from stretto.pipelining.events import BlockTimes
from stretto.pipelining.rng import batch_rng
from stretto.tree import map_tensors, tensors_of

_WARMUP = 2
_MIN_PASSES = 5
_MAX_PASSES = 50
_ENOUGH_S = 2.0


def measure_times(parts: Sequence[nn.Module], sample: Any, names: Sequence[str] | None = None) -> BlockTimes:
    """Seconds of each of `parts`, which run in a row on `sample`, for the forward and the backward of this batch.

    Layers or blocks; the medians of several passes through all of them, in training mode, without the optimizer.
    The forward is one that makes a graph. On an accelerator each part is waited for.

    Raises RuntimeError, with the part's name, where one fails.
    """
    names = names or [f"part {at}" for at in range(len(parts))]
    copies = [_copy_of(part, name).train() for part, name in zip(parts, names, strict=True)]
    passes: list[tuple[list[float], list[float]]] = []
    until = time.perf_counter() + _ENOUGH_S
    with batch_rng(0, 0), torch.enable_grad():
        while len(passes) < _WARMUP + _MIN_PASSES or (len(passes) < _MAX_PASSES and time.perf_counter() < until):
            passes.append(_pass(copies, sample, names))
    kept = passes[_WARMUP:]
    forward_s, backward_s = (
        [statistics.median(each) for each in zip(*kind, strict=True)] for kind in zip(*kept, strict=True)
    )
    return BlockTimes(tuple(forward_s), tuple(backward_s))


def _copy_of(part: nn.Module, name: str) -> nn.Module:
    try:
        return copy.deepcopy(part)
    except Exception as error:
        raise RuntimeError(
            f"{name} ({type(part).__name__}) cannot be copied, which measuring needs: {error}. Cut by "
            '"parameters", or by the numbers of layers'
        ) from error


def run_part(part: nn.Module, value: Any, name: str) -> Any:
    """`part(value)`. Raises RuntimeError, with the part's name and what it got, where it fails."""
    try:
        return part(value)
    except Exception as error:
        raise RuntimeError(
            f"{name} ({type(part).__name__}) fails on what the sample becomes before it, {describe_value(value)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def at_a_cut(value: Any) -> Any:
    """`value` as a part's input: it may be written to, and a gradient goes back to its tensors, but no further."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad).clone(), value)


def backward_from(output: Any) -> None:
    """The backward of a part, from gradients of 1 for all that it puts out."""
    roots = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _pass(parts: Sequence[nn.Module], sample: Any, names: Sequence[str]) -> tuple[list[float], list[float]]:
    forward_s, backward_s = [], []
    value = sample
    for part, name in zip(parts, names, strict=True):
        given = at_a_cut(value)
        part.zero_grad()
        begin = _now(value)
        output = run_part(part, given, name)
        middle = _now(output)
        backward_from(output)
        forward_s.append(middle - begin)
        backward_s.append(_now(output) - middle)
        value = output
    return forward_s, backward_s


def _now(value: Any) -> float:
    """The time at which all that was asked of the accelerator that `value` is on is done."""
    for device in {tensor.device for tensor in tensors_of(value)}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()
