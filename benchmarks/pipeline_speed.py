"""ResNet-32 over two processes of one thread: seconds a step with layer-wise staleness and with its competitors.

Batches of 64 and of 128 images of 32 x 32. Every way to train is run at its own best cut, which short runs of the
cuts around the predicted one have chosen; then all take turns in the same two processes. A step's seconds are those
of a long run: neither the warm-up nor the drain is in them.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch
from harness import Report, Spread, parse_arguments, prepare_process, ratio, take_turns
from pipeline_common import (
    Batch,
    ContiguousBoundaries,
    Crew,
    State,
    Trainer,
    Way,
    balanced_cuts,
    cut,
    make_layers,
    resnet,
    seconds_per_step,
    stale_ways,
    synchronous_ways,
)
from torch import nn
from torch.nn.functional import cross_entropy

from stretto.pipelining import Staleness
from stretto.pipelining.block import Block, enter
from stretto.pipelining.options import Options

K = 2
TWO_THREADS = "one process, two threads"
HALVES = Way("DSP, 2 micro-batches", Staleness.of(K), num_microbatches=2)
BOUND = "DSP without messages"
SPLIT, DSP, STASHED = (way.name for way in stale_ways(K))


@dataclass(frozen=True, slots=True)
class Settings:
    """How long the runs are."""

    depth: int = 32
    batch_sizes: tuple[int, ...] = (64, 128)
    num_microbatches: tuple[int, ...] = (2, 4, 8)
    reach: int = 2
    """Cuts tried on either side of the balanced one."""
    num_trials: int = 2
    num_trial_steps: int = 6
    num_steps: int = 16
    warmup: int = 4


QUICK = Settings(8, (8,), (2,), reach=0, num_trials=1, num_trial_steps=3, num_steps=4, warmup=2)


def make_batches(state: State, batch_size: int) -> list[Batch]:
    """The same in every process."""
    if state.get("batch_size") != batch_size:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand((4, batch_size, 3, 32, 32), generator=generator)
        y = torch.randint(0, 10, (4, batch_size), generator=generator)
        batches = [
            (images.to(memory_format=torch.channels_last), labels) for images, labels in zip(x, y, strict=True)
        ]
        state["batch_size"], state["batches"] = batch_size, batches
    return state["batches"]


def make_trainer(state: State, way: Way, first: int, depth: int) -> None:
    """Block `rank` of the cut whose first block has `first` layers, ready to be trained as `way` says."""
    layers = make_layers(depth)
    block = cut(layers, (first, len(layers) - first))[state["rank"]]
    if way.spec is None:
        block = ContiguousBoundaries(block)
    trainers = state.setdefault("trainers", {})
    trainers[way.name] = Trainer(way, block, state["rank"], K, cross_entropy)


def train(state: State, name: str, batch_size: int, num_steps: int, warmup: int) -> float:
    """Seconds a step."""
    batches = list(islice(cycle(make_batches(state, batch_size)), num_steps))
    return seconds_per_step(state["trainers"][name].train(batches), warmup)


def compute(state: State, first: int, batch_size: int, num_steps: int, warmup: int, depth: int) -> float:
    """Seconds a step of what DSP computes in this rank, on made-up inputs and gradients: nothing is sent."""
    layers = make_layers(depth)
    blocks = cut(layers, (first, len(layers) - first))
    rank = state["rank"]
    options = Options(spec=Staleness.of(K), loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(blocks[rank].parameters(), lr=0.01, momentum=0.9, nesterov=True)
    block = Block(blocks[rank], rank, optimizer, None, options)
    ends = []
    x, y = make_batches(state, batch_size)[0]
    with torch.no_grad():
        output = blocks[0](x)
    value, gradients = (x, [torch.rand_like(output) / batch_size]) if rank == 0 else (output, None)
    for n in range(num_steps):
        block.forward(enter(n, value, y))
        if block.is_due:
            block.backward(gradients)
            block.end_backward(n)
        ends.append(time.perf_counter())
    return seconds_per_step(ends, warmup)


def train_alone(state: State, batch_size: int, num_steps: int, warmup: int, depth: int) -> float:
    """Seconds a step of the whole net in rank 0 with two threads."""
    if state["rank"] > 0:
        return 0.0
    if "alone" not in state:
        net = nn.Sequential(*make_layers(depth))
        state["alone"] = net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    net, optimizer = state["alone"]
    torch.set_num_threads(2)
    ends = []
    for x, y in islice(cycle(make_batches(state, batch_size)), num_steps):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    torch.set_num_threads(1)
    return seconds_per_step(ends, warmup)


def choose_cut(crew: Crew, way: Way, batch_size: int, balanced: int, settings: Settings) -> int:
    """The quickest of the cuts around the balanced one, in short runs taken in turns."""
    seconds: dict[int, float] = {}
    num_layers = len(resnet(settings.depth))
    for first in range(balanced - settings.reach, balanced + settings.reach + 1):
        if 0 < first < num_layers:
            crew.run(make_trainer, way, first, settings.depth)
            runs = [
                crew.run(train, way.name, batch_size, settings.num_trial_steps, 2)[0]
                for _ in range(settings.num_trials)
            ]
            seconds[first] = min(runs)
    return min(seconds, key=lambda first: seconds[first])


def compare(report: Report, crew: Crew, batch_size: int, settings: Settings) -> list[str]:
    """One batch size: choose the cuts, take turns, judge. Returns the rows of the table."""
    ways = (*stale_ways(K), HALVES, *synchronous_ways(settings.num_microbatches, K))
    balanced = crew.run(balanced_cuts, settings.depth, batch_size, ways)[0]
    chosen = {}
    for way in ways:
        chosen[way.name] = choose_cut(crew, way, batch_size, balanced[way.name], settings)
        crew.run(make_trainer, way, chosen[way.name], settings.depth)
    num_layers = len(resnet(settings.depth))
    report.note(
        f"batch {batch_size}, layers of the two blocks: "
        + "; ".join(f"{name} {first} + {num_layers - first}" for name, first in chosen.items())
    )

    def run(name: str) -> float:
        return crew.run(train, name, batch_size, settings.num_steps, settings.warmup)[0]

    def run_alone() -> float:
        return crew.run(train_alone, batch_size, settings.num_steps, settings.warmup, settings.depth)[0]

    def run_bound() -> float:
        return max(crew.run(compute, chosen[DSP], batch_size, settings.num_steps, settings.warmup, settings.depth))

    competitors = {way.name: partial(run, way.name) for way in ways}
    competitors |= {BOUND: run_bound, TWO_THREADS: run_alone}
    seconds = take_turns(competitors, report.arguments.rounds)
    torchs = [way.name for way in ways if way.spec is None]
    best = min(torchs, key=lambda name: statistics.median(seconds[name]))
    rows = []
    for name, values in seconds.items():
        report.add(f"batch {batch_size}: {name}", Spread.of([1e3 * value for value in values]), "ms a step")
        bar = {DSP: 1.4, STASHED: 1.5}.get(name)
        faster = ratio(seconds[SPLIT], values)
        if name != SPLIT:
            report.add(f"batch {batch_size}: {name} over {SPLIT}", faster, "times", at_least=bar)
        if bar:
            over_best = ratio(seconds[best], values)
            report.add(f"batch {batch_size}: {name} over torch's best, {best}", over_best, "times")
        first = chosen.get(DSP if name == BOUND else name)
        layers = "all" if first is None else f"{first} + {num_layers - first}"
        milliseconds = 1e3 * statistics.median(values)
        title = f"**{name}**" if bar else name
        rows.append(f"| {batch_size} | {title} | {layers} | {milliseconds:.0f} | {faster} |")
    return rows


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=9)
    if not arguments.quick:
        prepare_process()
    settings = QUICK if arguments.quick else Settings()
    with Crew(K) as crew:
        report = Report("pipeline_speed", arguments)
        rows = [row for batch_size in settings.batch_sizes for row in compare(report, crew, batch_size, settings)]
    head = [
        "| batch | way to train | layers in each block | ms a step | steps a second, relative to split |",
        "|---|---|---|---|---|",
    ]
    report.finish("\n".join(head + rows), "docs/pipelining.md")


if __name__ == "__main__":
    main()
