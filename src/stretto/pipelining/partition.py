"""Where to cut a model: the row of blocks whose slowest is as fast as it can be.

A block with m_k > 0 computes its forward twice, the last one never does, so it takes more layers than an even cut
would give it. With few blocks the cut is worth as much as the rest of the schedule.
"""

import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from stretto.pipelining.events import BlockTimes, recomputes
from stretto.pipelining.layers import Layer, build_block, check_not_tied, layers_of
from stretto.pipelining.measure import measure_times
from stretto.pipelining.names import keep_names
from stretto.pipelining.spec import PerBlock, Staleness, check_count

if TYPE_CHECKING:
    from torch.distributed.pipelining import Pipe

By = Literal["time", "parameters", "uniform"]


def partition(
    model: "nn.Module | Sequence[nn.Module] | Pipe",
    num_stages: int,
    *,
    by: By | Sequence[int] = "time",
    sample: Any = None,
    staleness: PerBlock | Staleness | str | None = None,
) -> list[nn.Module]:
    """Cut `model` into `num_stages` blocks that run one after the other, the slowest as fast as can be.

    The blocks share the layers of the model, and their `state_dict` has its keys. A layer stays whole; an inner
    plain nn.Sequential is opened, so that a cut may fall into it.

    Args:
        model: an nn.Sequential; a list of modules, named as nn.Sequential(*list) names them; or what
            torch.distributed.pipelining.pipeline() made of a model, whose stages are taken as they are.
        num_stages: blocks, one for each device.
        by: "time" measures each layer's forward and backward on copies, "parameters" counts theirs, "uniform"
            counts layers; or the number of layers of each block, such as (6, 8), as `stretto plan` prints it.
        sample: a batch as the model gets it, for "time".
        staleness: the m that the blocks will run with, as `Staleness.of` reads it; decides which of them recompute,
            for "time". Default: m_k = K-1-k.

    Where torch.distributed is initialised, "time" is collective: process 0 measures and all cut alike.

    Raises TypeError for a model that is no row of layers; ValueError for more blocks than layers, for weights that
    two blocks would share, a sample that is missing; RuntimeError, with its name, for a layer that fails on it.
    """
    if (pipe := _as_pipe(model)) is not None:
        if pipe.num_stages != num_stages:
            raise ValueError(f"num_stages={num_stages}, but pipeline() split the model into {pipe.num_stages}")
        _check_row(pipe)
        stages = [keep_names(pipe.get_stage_module(at)) for at in range(num_stages)]
        check_not_tied(stages)
        return stages
    layers = layers_of(model)
    check_number(num_stages, layers)
    if by == "time":
        bounds = _measured_cut(layers, num_stages, sample, staleness)
    elif isinstance(by, str):
        bounds = best_cut([count_costs(layers, by)] * num_stages)
    elif not isinstance(by, tuple | list):
        raise TypeError(f"by={by!r}: expected {', '.join(get_args(By))}, or the number of layers of each block")
    elif len(by) != num_stages or sum(by) != len(layers) or min(by) < 1:
        raise ValueError(
            f"by={tuple(by)}: expected the number of layers of each of {num_stages} blocks, {len(layers)} in all"
        )
    else:
        ends = list(itertools.accumulate(by))
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    return build_blocks(layers, bounds)


def measure_layers(layers: Sequence[Layer], sample: Any) -> BlockTimes:
    """Seconds of each layer, measured on copies."""
    return measure_times([layer.module for layer in layers], sample, [f"layer {layer.name!r}" for layer in layers])


def time_costs(times: BlockTimes, staleness: Staleness) -> list[list[float]]:
    """Seconds that each layer adds to a block, for every block: with the recompute where there is one."""
    each = list(zip(times.forward_s, times.recompute_s, times.backward_s, strict=True))
    return [
        [forward + again * is_needed + backward for forward, again, backward in each]
        for is_needed in recomputes(staleness)
    ]


def count_costs(layers: Sequence[Layer], by: By) -> list[float]:
    """The number of parameters of each layer, or 1 for each. Raises ValueError for another `by`."""
    if by == "parameters":
        return [float(sum(each.numel() for each in layer.module.parameters())) for layer in layers]
    if by == "uniform":
        return [1.0] * len(layers)
    raise ValueError(f'by={by!r}: expected "time", "parameters" or "uniform"')


def check_number(num_stages: int, layers: Sequence[Layer]) -> None:
    """Raise ValueError if so many blocks cannot be made of the layers."""
    check_count(num_stages, "blocks")
    if num_stages > len(layers):
        raise ValueError(
            f"{num_stages} blocks of a model with {len(layers)} layers: expected 1 to {len(layers)}, "
            "as no layer is split"
        )


def build_blocks(layers: Sequence[Layer], bounds: Sequence[tuple[int, int]]) -> list[nn.Module]:
    """The blocks that hold the layers [first, end) each. Raises ValueError for tied weights."""
    blocks: list[nn.Module] = [build_block(layers[first:end]) for first, end in bounds]
    check_not_tied(blocks)
    return blocks


def best_cut(costs: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The layers of each block, [first, end), from the cost of each layer in each block [num_blocks][num_layers].

    By dynamic programming: the dearest block is as cheap as it can be, and among such cuts the sum of squares is
    the smallest, so that the others are even. Layers that cost nothing go to the earlier block.
    """
    sums = np.array([np.concatenate([[0.0], np.cumsum(row)]) for row in costs])
    dearest = _solve(sums, np.maximum, lambda cost: cost)[0]
    limit = dearest * (1 + 1e-9)
    _, ends = _solve(sums, np.add, lambda cost: np.where(cost <= limit, cost**2, np.inf))
    return list(zip([0, *ends[:-1]], ends, strict=True))


_Values = NDArray[np.float64]


def _solve(
    sums: _Values, join: Callable[[_Values, _Values], _Values], weigh: Callable[[_Values], _Values]
) -> tuple[float, list[int]]:
    """The least `join` of the blocks' weighed costs, and where each block ends."""
    num_blocks, num_layers = sums.shape[0], sums.shape[1] - 1
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    came_from: list[NDArray[np.int64]] = []
    for k in range(num_blocks):
        following = np.full(num_layers + 1, np.inf)
        origin = np.zeros(num_layers + 1, np.int64)
        for end in range(k + 1, num_layers + 1):
            totals = join(best[:end], weigh(sums[k, end] - sums[k, :end]))
            origin[end] = end - 1 - np.argmin(totals[::-1])  # of equals the last
            following[end] = totals[origin[end]]
        best = following
        came_from.append(origin)
    ends = [num_layers]
    for origin in reversed(came_from[1:]):
        ends.append(int(origin[ends[-1]]))
    return float(best[num_layers]), ends[::-1]


def _measured_cut(
    layers: Sequence[Layer], num_stages: int, sample: Any, staleness: PerBlock | Staleness | str | None
) -> list[tuple[int, int]]:
    """The best cut by measured times, the same in all processes."""

    def measure() -> list[tuple[int, int]]:
        if sample is None:
            raise ValueError('by="time" measures the layers and needs a batch: give sample=, or by="parameters"')
        spec = Staleness.of(num_stages, m=staleness)
        return best_cut(time_costs(measure_layers(layers, sample), spec))

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return measure()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [measure()]
        except (RuntimeError, ValueError) as error:  # the others must not wait for it
            answer = [error]
        except Exception as error:
            answer = [RuntimeError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return list(answer[0])


def _check_row(pipe: "Pipe") -> None:
    """Raise ValueError if a stage takes more, or less, than what the one before puts out."""
    stage: Any = None
    for node in pipe.split_gm.graph.nodes:
        if node.op != "call_module":
            continue
        for value in node.all_input_nodes:
            source = value.args[0] if value.target is operator.getitem else value
            if source is not stage if stage is not None else source.op != "placeholder":
                raise ValueError(
                    f"{node.name} takes {value.name}, which comes from {source.name} and not from the stage "
                    "before: blocks pass values to the next one only. Cut elsewhere, or hand the value through "
                    "every stage"
                )
        stage = node


def _as_pipe(model: Any) -> "Pipe | None":
    """`model` if pipeline() made it; none can be where the package that has it was never imported."""
    module = sys.modules.get("torch.distributed.pipelining")
    return model if module is not None and isinstance(model, module.Pipe) else None
