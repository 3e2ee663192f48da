"""K = 4 and 8 emulated devices: does a pipeline run as fast as the event model says? Slow links and stragglers.

Processes, queues, gloo and gradients are real; what a device computes is not: each forward, recompute and backward
sleeps until its deadline, so two cores can stand for eight devices. A hop is emulated, too: nobody may use what a
neighbour sent before the hop's time is over. For `ScheduleDSP` that time begins when a message has arrived; for
torch's schedules, whose messages carry it, when the operation that made it was over, which favours them.

Forward and recompute take 1, the backward 2. Hops are fractions of the whole net's forward.
"""

import queue
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Report, Spread, parse_arguments, ratio, take_turns
from pipeline_common import Crew, State, Trainer, Way, seconds_per_step, synchronous_ways
from torch import nn

from stretto.pipelining import Staleness
from stretto.pipelining.events import BlockTimes, predict
from stretto.pipelining.transport import Inbox

ROWS = 16
"""Of a batch [16, 2]: a value that is learned from, and when the operation that made it was over."""
STRAGGLER_PROBABILITY = 1 / 3


@dataclass(frozen=True, slots=True)
class Setting:
    """What is emulated."""

    forward_s: float
    """Of a block on a batch."""
    hop: float = 0.0
    straggling: float = 0.0
    """An operation takes 1 + this times as long, with probability 1/3."""

    def __str__(self) -> str:
        return f"stragglers s = {self.straggling:g}" if self.straggling else f"hop {self.hop:g}"

    def times(self, num_blocks: int) -> BlockTimes:
        """Of all blocks."""
        return BlockTimes.even(num_blocks, num_blocks * self.forward_s, 2 * num_blocks * self.forward_s)

    def hop_s(self, num_blocks: int) -> float:
        """Seconds."""
        return self.hop * num_blocks * self.forward_s


class Device:
    """Sleeps for what block `index` would compute."""

    def __init__(self, index: int, forward_s: float, straggling: float, hop_s: float) -> None:
        self._seconds = {"forward": forward_s, "recompute": forward_s, "backward": 2 * forward_s}
        self._straggling = straggling
        self._draws = {kind: random.Random(f"{index} {kind}") for kind in self._seconds}
        self._hop_s = hop_s

    def work(self, kind: str, operand: torch.Tensor) -> None:
        """One operation on [rows, 2], from when the operand is there."""
        made_at = operand[:, 1].max().item()
        if made_at <= time.perf_counter():  # torch asks for shapes with memory in which anything may stand
            sleep_until(made_at + self._hop_s)
        is_slow = self._draws[kind].random() < STRAGGLER_PROBABILITY
        sleep_until(time.perf_counter() + self._seconds[kind] * (1 + self._straggling * is_slow))


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, device: Device, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.device = device
        device.work(kind, x)
        return _stamped(x * weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.device.work("backward", gradients[0])
        of_x = _stamped(gradients[0] * weight) if ctx.needs_input_grad[0] else None
        return of_x, (gradients[0] * x)[:, 0].sum(), None, None


def _stamped(value: torch.Tensor) -> torch.Tensor:
    value[:, 1] = time.perf_counter()
    return value


class EmulatedBlock(nn.Module):
    """float64 [rows, 2] -> the same, times a weight, after as long as the device takes."""

    def __init__(self, device: Device, recomputes: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self._device = device
        self._recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = "recompute" if self._recomputes and torch.is_grad_enabled() else "forward"
        return _Operation.apply(x, self.weight, self._device, kind)


class SlowLink:
    """In the place of an inbox's queue: what was put is there `hop_s` later."""

    def __init__(self, hop_s: float) -> None:
        self._hop_s = hop_s
        self._arriving: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._next: deque[tuple[float, Any]] = deque()

    def put(self, message: Any) -> None:
        self._arriving.put((time.perf_counter() + self._hop_s, message))

    def empty(self) -> bool:
        if not self._next and not self._arriving.empty():
            self._next.append(self._arriving.get())
        return not self._next or self._next[0][0] > time.perf_counter()

    def get(self) -> Any:
        at, message = self._next.popleft() if self._next else self._arriving.get()
        sleep_until(at)
        return message


def sleep_until(at: float) -> None:
    """Return no sooner."""
    while (rest := at - time.perf_counter()) > 0:
        time.sleep(rest)


def mean_value(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return (output - target)[:, 0].mean()


def make_trainer(state: State, way: Way, setting: Setting) -> None:
    """Block `rank` of as many as there are processes."""
    rank, size = state["rank"], state["size"]
    is_stale = way.spec is not None
    device = Device(
        rank,
        setting.forward_s / way.num_microbatches,
        setting.straggling,
        0.0 if is_stale else setting.hop_s(size),
    )
    recomputes = is_stale and way.spec.m[rank] > 0 and way.spec.backward_params == "current"
    trainer = Trainer(way, EmulatedBlock(device, recomputes), rank, size, mean_value)
    if is_stale and setting.hop:
        for inbox in trainer.schedule._near._inboxes:
            assert isinstance(inbox, Inbox)
            inbox._arrived = SlowLink(setting.hop_s(size))
    state.setdefault("trainers", {})[way, setting] = trainer


def train(state: State, way: Way, setting: Setting, num_steps: int, warmup: int) -> float:
    """Seconds a step, after the first `warmup`."""
    batch = torch.zeros((ROWS, 2), dtype=torch.float64)
    return seconds_per_step(state["trainers"][way, setting].train([(batch, batch)] * num_steps), warmup)


def seconds_taken(crew: Crew, way: Way, setting: Setting, num_rounds: int) -> Callable[[], float]:
    """A competitor: trains until the warm-up is over and then for about `num_rounds` turns of its slowest loop."""
    age = 0 if way.spec is None else way.spec.m[0]
    warmup = 2 * (age + 1)
    num_steps = warmup + max(1, round(num_rounds / (age + 1))) * (age + 1)
    crew.run(make_trainer, way, setting)
    return lambda: crew.run(train, way, setting, num_steps, warmup)[0]


def against_the_model(report: Report, crew: Crew, num_blocks: int, forward_s: float, num_steps: int) -> list[str]:
    """Measured throughput beside the event model's, with and without a hop of half the net's forward."""
    ways = {
        "K-1-k": Way("K-1-k", Staleness.of(num_blocks)),
        "2(K-1-k)": Way("2(K-1-k)", Staleness.dsp(num_blocks)),
    }
    settings = [Setting(forward_s), Setting(forward_s, hop=0.5)]
    competitors = {
        (way.name, setting): seconds_taken(crew, way, setting, num_steps)
        for setting in settings
        for way in ways.values()
    }
    seconds = take_turns(competitors, report.arguments.rounds)
    rows = []
    for (name, setting), values in seconds.items():
        spec = ways[name].spec
        expected = predict(spec, setting.times(num_blocks), hop_s=setting.hop_s(num_blocks))
        title = f"K = {num_blocks}, m = {name}, {setting}"
        reached = Spread.of([100 * expected.seconds_per_batch / value for value in values])
        report.add(f"{title}: of the event model's throughput", reached, "%", at_least=95.0)
        speedup = Spread.of([setting.times(num_blocks).one_device_s / value for value in values])
        rows.append(
            f"| {num_blocks} | {name} | {setting.hop:g} | {expected.speedup:.2f} | {speedup} | "
            f"{reached.median:.1f} % |"
        )
    short, long = (seconds[name, settings[1]] for name in ways)
    report.add(f"K = {num_blocks}, hop 0.5: 2(K-1-k) over K-1-k", ratio(short, long), "times", at_least=1.0)
    return rows


def against_synchronous(
    report: Report, crew: Crew, setting: Setting, num_microbatches: Sequence[int], num_steps: int
) -> dict[str, Spread]:
    """K = 4 beside GPipe and 1F1B: milliseconds a batch, absolute."""
    num_blocks = 4
    stale = [Way("DSP, K-1-k", Staleness.of(num_blocks)), Way("DSP, 2(K-1-k)", Staleness.dsp(num_blocks))]
    synchronous = synchronous_ways(num_microbatches, num_blocks)
    competitors = {way.name: seconds_taken(crew, way, setting, num_steps) for way in (*stale, *synchronous)}
    seconds = take_turns(competitors, report.arguments.rounds)
    best = min((way.name for way in synchronous), key=lambda name: statistics.median(seconds[name]))
    title = f"K = 4, {setting}"
    bar = None if setting.straggling else 1.3
    taken = {name: Spread.of([1e3 * value for value in values]) for name, values in seconds.items()}
    for name, milliseconds in taken.items():
        report.add(f"{title}: {name}", milliseconds, "ms a batch")
    for way in stale:
        faster = ratio(seconds[best], seconds[way.name])
        report.add(f"{title}: {way.name} over {best}", faster, "times", at_least=bar)
    return taken


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=3)
    quick = arguments.quick
    report = Report("pipeline_emulated", arguments)
    forward_s, num_steps = (0.001, 4) if quick else (0.03, 20)
    model_rows: list[str] = []
    taken: dict[Setting, dict[str, Spread]] = {}
    settings = (
        Setting(forward_s, hop=0.1),
        Setting(forward_s, straggling=1.0),
        Setting(forward_s, straggling=2.0),
    )
    for num_blocks in (4,) if quick else (4, 8):
        with Crew(num_blocks) as crew:
            model_rows += against_the_model(report, crew, num_blocks, forward_s, num_steps)
            for setting in settings[: 1 if quick else None] if num_blocks == 4 else ():
                counts = (4,) if quick else (2, 4, 8, 16)
                taken[setting] = against_synchronous(report, crew, setting, counts, num_steps)
    model_head = [
        "| K | m | hop | speed-up, event model | measured | throughput of the model's |",
        "|---|---|---|---|---|---|",
    ]
    head = [
        f"| K = 4, ms a batch | {' | '.join(map(str, taken))} |",
        f"|---|{'---|' * len(taken)}",
    ]
    rows = [
        f"| {name} | {' | '.join(str(of_ways[name]) for of_ways in taken.values())} |"
        for name in next(iter(taken.values()))
    ]
    report.finish("\n".join([*model_head, *model_rows, "", *head, *rows]), "docs/pipelining.md")


if __name__ == "__main__":
    main()
