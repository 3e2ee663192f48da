"""How to split a model over K devices: the cut, (p; m), memory and predicted speed, beside synchronous schedules.

Each way of training is predicted at its own best cut of the same measured layers: one without a recompute is cut
evenly, one with it gives the last block more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stretto.pipelining.events import (
    BlockTimes,
    Microbatching,
    Steady,
    predict,
    predict_microbatches,
    smallest_m,
)
from stretto.pipelining.layers import Layer, layers_of
from stretto.pipelining.memory import (
    BlockMemory,
    BlockSizes,
    MakeOptimizer,
    measure_sizes,
    predict_memory,
    predict_microbatch_memory,
)
from stretto.pipelining.partition import (
    By,
    best_cut,
    build_blocks,
    check_number,
    count_costs,
    measure_layers,
    time_costs,
)
from stretto.pipelining.spec import BackwardParams, Staleness
from stretto.tree import tensors_of

Bounds = tuple[tuple[int, int], ...]
Sizes = Callable[[Bounds], list[BlockSizes]]

NUM_MICROBATCHES = (2, 4, 8)
_AS_FAST = 1.01


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block of the chosen cut."""

    first_layer: str
    last_layer: str
    num_layers: int
    num_parameters: int
    forward_s: float
    backward_s: float
    utilisation: float
    """The part of the time in which its device works."""
    memory: BlockMemory


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train on the same devices, at its own best cut."""

    name: str
    detail: str
    """(p; m), or the number of micro-batches."""
    seconds_per_batch: float
    speedup: float
    """Over one device that holds the whole model."""
    num_layers: tuple[int, ...]
    largest_block_bytes: int
    is_exact: bool
    """Whether it computes what plain training computes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What `plan` found. Times are predictions for a long run, without optimizer and loss."""

    staleness: Staleness
    why: str
    times: BlockTimes
    """Of the blocks."""
    hop_s: float
    blocks: tuple[BlockPlan, ...]
    chosen: Way
    split_backpropagation: Way
    others: tuple[Way, ...]

    @property
    def speedup_over_split(self) -> float:
        """How many times as many batches as split backpropagation, which waits in every block."""
        return self.split_backpropagation.seconds_per_batch / self.chosen.seconds_per_batch

    @property
    def best_exact(self) -> Way:
        """The quickest of the ways that train as one device does."""
        exact = [way for way in (self.split_backpropagation, *self.others) if way.is_exact]
        return min(exact, key=lambda way: way.seconds_per_batch)

    @property
    def best_of_each(self) -> list[Way]:
        """The chosen way, split backpropagation, and of the others the quickest of each name."""
        best: dict[str, Way] = {}
        for way in (self.chosen, self.split_backpropagation, *self.others):
            if way.name not in best or way.seconds_per_batch < best[way.name].seconds_per_batch:
                best[way.name] = way
        return list(best.values())

    @property
    def gains(self) -> bool:
        """Whether staleness is predicted to be quicker than everything that needs none."""
        return self.chosen.speedup > self.best_exact.speedup * _AS_FAST


def plan(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    num_devices: int,
    *,
    hop_s: float = 0.0,
    by: By = "time",
    staleness: Staleness | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Plan:
    """Measure the layers of `model` on copies, and choose cut and staleness for `num_devices` such devices.

    Args:
        model: an nn.Sequential, or a list of modules that run one after the other.
        sample: a batch as the model gets it.
        num_devices: K, one block on each.
        hop_s: latency between two neighbours.
        by: what the cut balances, as in `partition`.
        staleness: (p; m); default: the smallest m that keeps the devices busy.
        optimizer: makes one from a list of parameters, so that its state is counted.

    Raises what `partition` raises.
    """
    layers = layers_of(model)
    check_number(num_devices, layers)
    costs = None if by == "time" else [count_costs(layers, by)] * num_devices
    layer_times = measure_layers(layers, sample)
    counted: dict[Bounds, list[BlockSizes]] = {}

    def sizes(bounds: Bounds) -> list[BlockSizes]:
        if bounds not in counted:
            counted[bounds] = measure_sizes(build_blocks(layers, bounds), sample, optimizer)
        return counted[bounds]

    cuts = _Cuts(layer_times, costs, num_devices, hop_s)
    if staleness is None:
        spec = cuts.choose("current")
        why = "the smallest m that keeps the devices busy" + (f" with hops of {hop_s * 1e3:g} ms" if hop_s else "")
        if num_devices == 1:
            why = "one device waits for no other"
        elif spec.m[0] == 0:
            why = "no staleness is quicker: one block has nearly all the work, and would recompute"
    else:
        spec, why = staleness, "as given"
    bounds = cuts.bounds(spec)
    times = cuts.times(bounds)
    steady, held = predict(spec, times, hop_s=hop_s), predict_memory(spec, sizes(bounds))
    blocks = tuple(_block(layers[first:end], times, at, steady, held[at]) for at, (first, end) in enumerate(bounds))
    stashed, none = cuts.choose("stashed"), Staleness.backprop(num_devices)
    others = _synchronous_ways(cuts, sizes, _num_rows(sample))
    if stashed.m[0] and stashed != spec:
        others.insert(0, _stale_way("with stashed weights", stashed, cuts, sizes))
    return Plan(
        spec,
        why,
        times,
        hop_s,
        blocks,
        _stale_way("layer-wise staleness", spec, cuts, sizes),
        _stale_way("split backpropagation", none, cuts, sizes),
        tuple(others),
    )


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The cuts of measured layers."""

    layer_times: BlockTimes
    costs: list[list[float]] | None
    """What the cut balances if not the times."""
    num_blocks: int
    hop_s: float

    def bounds(self, spec: Staleness) -> Bounds:
        """The best cut for a staleness."""
        return tuple(best_cut(self.costs or time_costs(self.layer_times, spec)))

    def times(self, bounds: Bounds) -> BlockTimes:
        """Of the blocks."""
        found = (self.layer_times.forward_s, self.layer_times.backward_s)
        return BlockTimes(*(tuple(sum(each[first:end]) for first, end in bounds) for each in found))

    def choose(self, backward_params: BackwardParams) -> Staleness:
        """The smallest staleness among those as quick as the quickest, each at its own cut.

        Which blocks recompute decides the cut, and the cut which should: every number of blocks is tried.
        """
        found = []
        for num_stale in range(self.num_blocks):
            ages = (1,) * num_stale + (0,) * (self.num_blocks - num_stale)
            first = Staleness.of(self.num_blocks, m=ages, backward_params=backward_params)
            spec = smallest_m(self.times(self.bounds(first)), self.hop_s, backward_params=backward_params)
            steady = predict(spec, self.times(self.bounds(spec)), hop_s=self.hop_s)
            found.append((steady.seconds_per_batch, spec))
        quickest = min(seconds for seconds, _ in found)
        return min(
            (spec for seconds, spec in found if seconds <= quickest * _AS_FAST), key=lambda spec: sum(spec.m)
        )


def _block(layers: Sequence[Layer], times: BlockTimes, at: int, steady: Steady, memory: BlockMemory) -> BlockPlan:
    parameters = {parameter for layer in layers for parameter in layer.module.parameters()}
    return BlockPlan(
        first_layer=layers[0].name,
        last_layer=layers[-1].name,
        num_layers=len(layers),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        forward_s=times.forward_s[at],
        backward_s=times.backward_s[at],
        utilisation=steady.utilisation[at],
        memory=memory,
    )


def _stale_way(name: str, spec: Staleness, cuts: _Cuts, sizes: Sizes) -> Way:
    bounds = cuts.bounds(spec)
    steady = predict(spec, cuts.times(bounds), hop_s=cuts.hop_s)
    return _way(name, f"{spec}", steady, bounds, predict_memory(spec, sizes(bounds)), is_exact=spec.m[0] == 0)


def _synchronous_ways(cuts: _Cuts, sizes: Sizes, num_rows: int) -> list[Way]:
    bounds = cuts.bounds(Staleness.backprop(cuts.num_blocks))
    times, ways = cuts.times(bounds), []
    kinds: tuple[tuple[str, Microbatching, bool], ...] = (
        ("GPipe", "gpipe", False),
        ("1F1B", "1f1b", False),
        ("GPipe with checkpointing", "gpipe", True),
    )
    for name, kind, checkpoint in kinds:
        for parts in NUM_MICROBATCHES:
            if parts <= num_rows:
                steady = predict_microbatches(kind, times, parts, hop_s=cuts.hop_s, checkpoint=checkpoint)
                held = predict_microbatch_memory(kind, sizes(bounds), parts, checkpoint=checkpoint)
                ways.append(_way(name, f"{parts} micro-batches", steady, bounds, held, is_exact=True))
    return ways


def _way(name: str, detail: str, steady: Steady, bounds: Bounds, held: list[BlockMemory], *, is_exact: bool) -> Way:
    return Way(
        name,
        detail,
        steady.seconds_per_batch,
        steady.speedup,
        tuple(end - first for first, end in bounds),
        max(memory.total_bytes for memory in held),
        is_exact,
    )


def _num_rows(sample: Any) -> int:
    """The number of examples in a batch: rows of its first tensor."""
    return next((len(tensor) for tensor in tensors_of(sample) if tensor.ndim), 1)
