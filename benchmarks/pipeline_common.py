"""Processes that train a split model, one block in each, for the benchmarks of `stretto.pipelining`.

A `Crew` is started once and then runs one function after another in all its processes, so that every competitor is
measured in the same ones. A `Way` is a way to train; `Trainer` trains a rank's block in that way.
"""

import contextlib
import itertools
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from accuracy_models import Residual
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from stretto.pipelining import ScheduleDSP, Staleness
from stretto.pipelining.layers import layers_of
from stretto.pipelining.partition import best_cut, measure_layers, time_costs

Batch = tuple[torch.Tensor, torch.Tensor]
State = dict[str, Any]
"""What a process keeps from one function to the next; "rank" and "size" are there from the start."""

SYNCHRONOUS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train a split model."""

    name: str
    spec: Staleness | None = None
    """Of `ScheduleDSP`; None for a schedule of torch's."""
    kind: Literal["gpipe", "1f1b"] = "gpipe"
    num_microbatches: int = 1


def stale_ways(num_blocks: int) -> tuple[Way, Way, Way]:
    """Split backpropagation, the default, and the default with stashed weights."""
    return (
        Way("split backpropagation", Staleness.backprop(num_blocks)),
        Way("DSP", Staleness.of(num_blocks)),
        Way("stashed", Staleness.delayed_gradients(num_blocks)),
    )


def synchronous_ways(num_microbatches: Sequence[int], num_blocks: int) -> tuple[Way, ...]:
    """GPipe and 1F1B by torch.distributed.pipelining, whose 1F1B needs as many micro-batches as blocks."""
    titles: dict[Literal["gpipe", "1f1b"], str] = {"gpipe": "GPipe", "1f1b": "1F1B"}
    return tuple(
        Way(f"{title}, {count} micro-batches", kind=kind, num_microbatches=count)
        for kind, title in titles.items()
        for count in num_microbatches
        if kind == "gpipe" or count >= num_blocks
    )


class Crew:
    """`size` processes of one thread each, joined by gloo."""

    def __init__(self, size: int) -> None:
        # Forked, before this process has computed anything: a thread pool would not survive it.
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (there, rank, size, Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(state, *arguments)` in every process, and what it returned in each.

        Raises RuntimeError, with its traceback, for the first process that failed.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            for ready in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in results]):
                rank = self._pipes.index(ready)  # type: ignore[arg-type]
                try:
                    error, results[rank] = self._pipes[rank].recv()
                except EOFError:
                    error = "its process ended"
                if error is not None:
                    self.close()
                    raise RuntimeError(f"rank {rank} failed: {error}")
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, size: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    state: State = {"rank": rank, "size": size}
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((None, function(state, *arguments)))
            except Exception:
                pipe.send((traceback.format_exc(), None))


class _Format(torch.autograd.Function):
    """A tensor in one memory format, its gradient in another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: torch.memory_format, back: torch.memory_format) -> torch.Tensor:
        ctx.back = back
        return x.contiguous(memory_format=there)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0].contiguous(memory_format=ctx.back), None, None


class ContiguousBoundaries(nn.Module):
    """A block that computes channels_last. torch's schedules send over gloo only what is contiguous."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.block(_Format.apply(x, torch.channels_last, torch.contiguous_format))
        if output.ndim != 4:
            return output
        return _Format.apply(output, torch.contiguous_format, torch.channels_last)


class Trainer:
    """Trains block `rank` of a split model in some way; all ranks make theirs at the same time."""

    def __init__(
        self, way: Way, module: nn.Module, rank: int, size: int, loss_fn: Callable[..., torch.Tensor]
    ) -> None:
        self.rank = rank
        self.is_last = rank == size - 1
        parameters = list(module.parameters())
        self.optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)
        self.schedule: Any
        self.train: Callable[..., list[float]]
        if way.spec is not None:
            count = way.num_microbatches
            self.schedule = ScheduleDSP((module, rank, size), self.optimizer, loss_fn, m=way.spec, accumulate=count)
            self.train = partial(self._train_stale, count)
        else:
            stage = PipelineStage(module, rank, size, torch.device("cpu"))
            self.schedule = SYNCHRONOUS[way.kind](stage, way.num_microbatches, loss_fn)
            self.train = self._train_synchronous

    def _train_stale(self, num_microbatches: int, batches: Iterable[Batch] | None) -> list[float]:
        """Train on the batches of the first rank, and return the time at the end of every step."""
        parts = batches and (
            part
            for x, y in batches
            for part in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True)
        )
        ends = []
        for x, y in self.schedule.feed(parts):
            self.schedule.step(x, target=y)
            ends.append(time.perf_counter())
        self.schedule.flush()
        return ends[num_microbatches - 1 :: num_microbatches]

    def _train_synchronous(self, batches: Iterable[Batch]) -> list[float]:
        """The same; all ranks give the batches."""
        ends = []
        for x, y in batches:
            given = (x,) if self.rank == 0 else ()
            losses: list[torch.Tensor] = []
            if self.is_last:
                self.schedule.step(*given, target=y, losses=losses, return_outputs=False)
            else:
                self.schedule.step(*given)
            self.optimizer.step()
            self.optimizer.zero_grad()
            ends.append(time.perf_counter())
        return ends


def seconds_per_step(ends: Sequence[float], warmup: int) -> float:
    """From the end of step `warmup` to that of the last: what a long run takes for a step."""
    return (ends[-1] - ends[warmup - 1]) / (len(ends) - warmup)


def resnet(depth: int = 32, width: int = 16) -> list[nn.Module]:
    """The layers of a residual net for images of 32 x 32 (arXiv 1512.03385, section 4.2): stem, (depth - 2) / 2
    residual layers, classifier. 1x1 convolutions go around where the width doubles."""
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    ]
    for scale, _ in itertools.product((1, 2, 4), range((depth - 2) // 6)):
        before = layers[-1]
        width_in = before.body[0].out_channels if isinstance(before, Residual) else width
        layers.append(Residual(width_in, scale * width))
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)))
    return layers


def cut(layers: Sequence[nn.Module], num_layers: Sequence[int]) -> list[nn.Module]:
    """Blocks of so many layers each."""
    ends = list(itertools.accumulate(num_layers))
    return [nn.Sequential(*layers[first:end]) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def make_layers(depth: int) -> list[nn.Module]:
    """A residual net, the same in every process; channels_last, which is faster on a CPU."""
    torch.manual_seed(0)
    return [layer.to(memory_format=torch.channels_last) for layer in resnet(depth)]


def balanced_cuts(state: State, depth: int, batch_size: int, ways: Sequence[Way]) -> dict[str, int]:
    """On rank 0: the layers of the first of two blocks when both take as long, by measured times.

    With a schedule of torch's as with split backpropagation: no recompute.
    """
    if state["rank"] > 0:
        return {}
    layers = layers_of(make_layers(depth))
    sample = torch.rand(batch_size, 3, 32, 32).to(memory_format=torch.channels_last)
    times = measure_layers(layers, sample)
    specs = {way.name: way.spec or Staleness.backprop(2) for way in ways}
    return {name: best_cut(time_costs(times, spec))[0][1] for name, spec in specs.items()}
