"""When each block of a split model computes what: an event model of its devices, one block on each.

A device works through its operations in a fixed order and starts each when the one before it is over and what it
needs has arrived. A message arrives `hop_s` after the operation that made it; sending never blocks. With (p; m),
block k does in iteration n the forward of batch n, then, if n >= m_k, the backward of batch n - m_k, a recompute
before it if m_k > 0 and its graph was not kept. The recompute does not wait for the gradient: it needs none, and so
hides a part of the wait for it. Numbers and times depend on m, not on how it divides into p and q.

In the steady state only loops matter: block i forward to block j, back to block i, i's next iteration. A loop comes
round once in 1 + m_i - m_j iterations, so (f, r, b: forward, recompute where there is one, backward; h: hops)

    seconds a batch  =    max     (f_i + b_i + ... + f_j + b_j + r_j + 2 (h_i + ... + h_{j-1})) / (1 + m_i - m_j)
                       i <= j

i = j is the bound that no staleness passes: the busiest device.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.pipelining.spec import BackwardParams, Staleness

Kind = Literal["forward", "recompute", "backward"]
Microbatching = Literal["gpipe", "1f1b"]
Hops = float | Sequence[float]
_Order = list[tuple[Kind, int]]
_BUSY = 0.99


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds that each block takes for a batch, first to last. Raises ValueError for what no clock shows."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    recompute_s: tuple[float, ...] = ()
    """Default: `forward_s`. Counted only where a block recomputes."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if not self.recompute_s:
            object.__setattr__(self, "recompute_s", self.forward_s)
        lengths = {name: len(getattr(self, name)) for name in self.__slots__}
        if not self.forward_s or len(set(lengths.values())) > 1:
            raise ValueError(f"times of {lengths}: expected one of each for every block, and one block or more")
        for name in self.__slots__:
            if not all(0 <= value < math.inf for value in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: expected seconds, 0 or more")
        if not self.one_device_s:
            raise ValueError("all times are 0: expected a block that takes some")

    @classmethod
    def even(cls, num_blocks: int, forward_s: float = 1.0, backward_s: float = 2.0) -> "BlockTimes":
        """A whole net's times in equal shares."""
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} blocks: expected 1 or more")
        return cls((forward_s / num_blocks,) * num_blocks, (backward_s / num_blocks,) * num_blocks)

    @property
    def K(self) -> int:  # noqa: N802  (the paper's symbol)
        """The number of blocks."""
        return len(self.forward_s)

    @property
    def one_device_s(self) -> float:
        """What a batch takes on one device: forward and backward of all blocks."""
        return sum(self.forward_s) + sum(self.backward_s)

    def work_s(self, spec: Staleness) -> tuple[float, ...]:
        """What each block works on a batch, with the recompute where there is one."""
        return tuple(self.loop_s(spec, k, k) for k in range(self.K))

    def loop_s(self, spec: Staleness, i: int, j: int) -> float:
        """The work on the way from block i forward to block j and back: j's recompute is the only one on it."""
        once = sum(self.forward_s[i : j + 1]) + sum(self.backward_s[i : j + 1])
        return once + self.recompute_s[j] * recomputes(spec)[j]


class Operation(NamedTuple):
    """What a device does from `start_s` to `end_s`."""

    block: int
    kind: Kind
    batch: int
    """With micro-batches the number of the micro-batch."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The operations of a run on all devices, those of a device in order, from its first batch to its last."""

    operations: tuple[Operation, ...]
    num_blocks: int

    @property
    def end_s(self) -> float:
        """When the last operation is over. The first begins at 0."""
        return max((operation.end_s for operation in self.operations), default=0.0)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The part of the run in which each device works."""
        busy = [0.0] * self.num_blocks
        for operation in self.operations:
            busy[operation.block] += operation.end_s - operation.start_s
        return tuple(value / self.end_s if self.end_s else 0.0 for value in busy)


@dataclass(frozen=True, slots=True)
class Steady:
    """A schedule's prediction for a long run."""

    seconds_per_batch: float
    utilisation: tuple[float, ...]
    """The part of the time in which each device works, recomputing included."""
    speedup: float
    """Over one device that holds the whole model and computes each batch forward and backward."""


def recomputes(spec: Staleness) -> tuple[bool, ...]:
    """Whether each block computes its forward a second time, at the weights of the backward."""
    return tuple(age > 0 and spec.backward_params == "current" for age in spec.m)


def play(
    spec: Staleness,
    times: BlockTimes,
    *,
    hop_s: Hops = 0.0,
    num_batches: int = 8,
) -> Timeline:
    """The events of `num_batches` batches through blocks with layer-wise staleness, warm-up and drain included.

    `hop_s` is the latency between neighbours, or one for each of the K - 1 gaps. m = 0 is split backpropagation.
    Raises ValueError where the times or hops are for another number of blocks than `spec`.
    """
    hops = _hops(hop_s, _same_blocks(spec, times))
    orders: list[_Order] = []
    for age, is_replayed in zip(spec.m, recomputes(spec), strict=True):
        order: _Order = []
        for n in range(num_batches + age):
            if n < num_batches:
                order.append(("forward", n))
            if n >= age and is_replayed:
                order.append(("recompute", n - age))
            if n >= age:
                order.append(("backward", n - age))
        orders.append(order)
    return Timeline(_run(orders, times, hops), spec.K)


def play_microbatches(
    kind: Microbatching,
    times: BlockTimes,
    num_microbatches: int,
    *,
    hop_s: Hops = 0.0,
    checkpoint: bool = False,
) -> Timeline:
    """The events of GPipe or 1F1B: a batch in M parts, each taking 1/M of its time, one update at the end.

    GPipe runs all parts forward, then all backward; 1F1B begins backwards as soon as it can. With `checkpoint`
    every block recomputes before a backward, once the gradient has come.
    """
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} micro-batches: expected 1 or more")
    hops = _hops(hop_s, times.K)
    orders = [_order(kind, times.K - k, num_microbatches, checkpoint=checkpoint) for k in range(times.K)]
    return Timeline(_run(orders, times, hops, num_microbatches, recompute_waits=True), times.K)


def predict(spec: Staleness, times: BlockTimes, *, hop_s: Hops = 0.0) -> Steady:
    """The steady state of layer-wise staleness, exact for times that do not vary (formula in the module's head).

    Raises ValueError where the times or hops are for another number of blocks than `spec`.
    """
    hops = _hops(hop_s, _same_blocks(spec, times))
    seconds = max(
        (times.loop_s(spec, i, j) + 2 * sum(hops[i:j])) / (1 + spec.m[i] - spec.m[j])
        for i in range(spec.K)
        for j in range(i, spec.K)
    )
    return Steady(seconds, tuple(work / seconds for work in times.work_s(spec)), times.one_device_s / seconds)


def predict_microbatches(
    kind: Microbatching,
    times: BlockTimes,
    num_microbatches: int,
    *,
    hop_s: Hops = 0.0,
    checkpoint: bool = False,
) -> Steady:
    """The steady state of GPipe or 1F1B. The first block is the last to finish a batch, so one batch shows it."""
    one = play_microbatches(kind, times, num_microbatches, hop_s=hop_s, checkpoint=checkpoint)
    return Steady(one.end_s, one.utilisation, times.one_device_s / one.end_s)


def smallest_m(times: BlockTimes, hop_s: Hops = 0.0, *, backward_params: BackwardParams = "current") -> Staleness:
    """The smallest staleness that reaches 99 % of the best throughput that any staleness has.

    Staleness costs accuracy, so no block gets more than its loops need: m_i - m_j >= loop / seconds a batch - 1,
    whose least solution is found from the last block on. A block with m_k = 0 saves its recompute, so each number
    of last blocks with m_k = 0 is tried. p is half of m_k - m_{k+1}, rounded down, and q the rest.

    Raises ValueError for hops of another number of gaps than K - 1.
    """
    num_blocks = times.K
    hops = _hops(hop_s, num_blocks)
    choices: list[tuple[int, Staleness, float]] = []  # blocks with m > 0, a specification with these, the bound
    for num_stale in range(num_blocks):
        pattern = (1,) * num_stale + (0,) * (num_blocks - num_stale)
        spec = Staleness.of(num_blocks, m=pattern, backward_params=backward_params)
        unbroken = times.loop_s(spec, num_stale, num_blocks - 1) + 2 * sum(hops[num_stale:])
        choices.append((num_stale, spec, max(*times.work_s(spec), unbroken)))
    limit_s = min(bound for _, _, bound in choices) / _BUSY * (1 + 1e-9)
    found = []
    for num_stale, spec, bound in choices:
        if bound > limit_s:
            continue
        m = [0] * num_blocks
        for i in reversed(range(num_stale)):
            m[i] = max(1, m[i + 1])
            for j in range(i + 1, num_blocks):
                loop_s = times.loop_s(spec, i, j) + 2 * sum(hops[i:j])
                m[i] = max(m[i], m[j] + math.ceil(loop_s / limit_s - 1e-9) - 1)
        found.append(m)
    best = min(found, key=sum)
    outputs = [(age - after) // 2 for age, after in zip(best, (*best[1:], 0), strict=True)]
    return Staleness(tuple(outputs), tuple(best), backward_params)


def _run(
    orders: Sequence[_Order], times: BlockTimes, hops: list[float], parts: int = 1, *, recompute_waits: bool = False
) -> tuple[Operation, ...]:
    """Each block's operations in their order, each as soon as its input has arrived, in 1/`parts` of its time."""
    seconds = {"forward": times.forward_s, "recompute": times.recompute_s, "backward": times.backward_s}
    last = len(orders) - 1
    waiting = [deque(order) for order in orders]
    free = [0.0] * len(orders)
    made: list[list[Operation]] = [[] for _ in orders]
    arrival: dict[tuple[int, Kind, int], float] = {}  # of an operation's input at its block
    while any(waiting):
        num_waiting = sum(map(len, waiting))
        for k, order in enumerate(waiting):
            while order:
                kind, n = order[0]
                needs: tuple[int, Kind, int] = (k, "forward" if kind == "forward" else "backward", n)
                ready = 0.0
                if k != (0 if kind == "forward" else last) and (kind != "recompute" or recompute_waits):
                    if needs not in arrival:
                        break
                    ready = arrival[needs]
                order.popleft()
                start = max(free[k], ready)
                free[k] = start + seconds[kind][k] / parts
                made[k].append(Operation(k, kind, n, start, free[k]))
                if kind == "forward":
                    arrival[k + 1, kind, n] = free[k] + hops[k]
                elif kind == "backward":
                    arrival[k - 1, kind, n] = free[k] + hops[k - 1]
        assert sum(map(len, waiting)) < num_waiting, f"the blocks wait for each other, before {waiting}"
    return tuple(one for of_block in made for one in of_block)


def _order(kind: Microbatching, ahead: int, parts: int, *, checkpoint: bool) -> _Order:
    """A block's operations on one batch; `ahead` counts the blocks from it to the last."""
    if kind not in ("gpipe", "1f1b"):
        raise ValueError(f'{kind!r}: expected "gpipe" or "1f1b"')
    lead = parts if kind == "gpipe" else min(parts, ahead)
    order: _Order = [("forward", part) for part in range(lead)]
    for part in range(parts):
        if checkpoint:
            order.append(("recompute", part))
        order.append(("backward", part))
        if lead + part < parts:
            order.append(("forward", lead + part))
    return order


def _same_blocks(spec: Staleness, times: BlockTimes) -> int:
    if spec.K != times.K:
        raise ValueError(f"times of {times.K} blocks for {spec}, which has {spec.K}")
    return spec.K


def _hops(hop_s: Hops, num_blocks: int) -> list[float]:
    """The latency behind each block; that behind the last is 0, as nothing goes there."""
    hops = [float(hop_s)] * (num_blocks - 1) if isinstance(hop_s, int | float) else [float(each) for each in hop_s]
    if len(hops) != num_blocks - 1:
        raise ValueError(f"hop_s={tuple(hops)}: expected one for each of the {num_blocks - 1} gaps, or a number")
    if not all(0 <= hop < math.inf for hop in hops):
        raise ValueError(f"hop_s={hop_s}: expected seconds, 0 or more")
    return [*hops, 0.0]
