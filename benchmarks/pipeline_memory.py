"""What each block of a split ResNet-32 holds in memory, counted and measured, K = 2 to 8, beside GPipe.

Counted by `stretto.pipelining.memory` from one batch. Measured by the operating system: the most memory of its own
that a block's process has while it trains, beyond what it had before the block was made. The C library is told to
give tensors back as soon as they are freed, so freed ones are not in it; what an operation needs while it runs is,
and so are messages under way. Batches of 64 images of 32 x 32, SGD with momentum; GPipe with 4 micro-batches.
"""

import ctypes
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Report, Spread, parse_arguments
from pipeline_common import Crew, State, Trainer, Way, cut, resnet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from stretto.pipelining import Staleness
from stretto.pipelining.memory import BlockMemory, measure_sizes, predict_memory, predict_microbatch_memory

NUM_MICROBATCHES = 4
MIB = 2**20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class Case:
    """A way to train, with checkpointing or without."""

    way: Way
    is_checkpointed: bool = False


def cases(num_blocks: int) -> dict[str, Case]:
    """What is compared."""
    gpipe = Way("GPipe", num_microbatches=NUM_MICROBATCHES)
    return {
        "DSP, K-1-k": Case(Way("DSP", Staleness.of(num_blocks))),
        "DSP, 2(K-1-k)": Case(Way("DSP", Staleness.dsp(num_blocks))),
        "stashed, K-1-k": Case(Way("stashed", Staleness.delayed_gradients(num_blocks))),
        "GPipe": Case(gpipe),
        "GPipe, checkpointing": Case(gpipe, is_checkpointed=True),
    }


class Checkpointed(nn.Module):
    """A block that keeps its input alone and computes again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def blocks_of(depth: int, num_blocks: int) -> list[nn.Module]:
    """As many layers in each, as far as that goes."""
    layers = resnet(depth)
    each, more = divmod(len(layers), num_blocks)
    return cut(layers, [each + (k < more) for k in range(num_blocks)])


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As the trainers'."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)


def count(_: State, depth: int, num_blocks: int, batch_size: int) -> dict[str, list[BlockMemory]]:
    """What the blocks hold in every case, first to last."""
    sizes = measure_sizes(blocks_of(depth, num_blocks), torch.rand(batch_size, 3, 32, 32), make_optimizer)
    counted = {}
    for name, case in cases(num_blocks).items():
        if case.way.spec is not None:
            counted[name] = predict_memory(case.way.spec, sizes)
        else:
            counted[name] = predict_microbatch_memory(
                "gpipe", sizes, NUM_MICROBATCHES, checkpoint=case.is_checkpointed
            )
    return counted


def measure(state: State, case: Case, depth: int, batch_size: int) -> int:
    """Bytes that this process has at its fullest beyond what it had before."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_TRIM_THRESHOLD, 1 << 16)
    rank, size = state["rank"], state["size"]
    batch = torch.rand(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    gc.collect()
    libc.malloc_trim(0)
    before = _own_bytes("VmRSS")
    block = blocks_of(depth, size)[rank]
    trainer = Trainer(case.way, Checkpointed(block) if case.is_checkpointed else block, rank, size, cross_entropy)
    Path("/proc/self/clear_refs").write_text("5")
    age = 0 if case.way.spec is None else case.way.spec.m[0]
    trainer.train([batch] * (age + 4))
    return _own_bytes("VmHWM") - before


def _own_bytes(field: str) -> int:
    """Of this process, by Linux: VmRSS now, VmHWM at its fullest since that was reset."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def compare(report: Report, num_blocks: int, depth: int, batch_size: int) -> list[str]:
    """All cases with one number of blocks. Returns the rows of the table."""
    rows = []
    names = list(cases(num_blocks))
    with Crew(1) as crew:  # apart, so that nothing of it is left where is measured
        counted = crew.run(count, depth, num_blocks, batch_size)[0]
    with Crew(num_blocks) as crew:
        measured: dict[str, list[list[int]]] = {name: [] for name in names}
        for turn in range(report.arguments.rounds + 1):
            for name in names:
                peaks = crew.run(measure, cases(num_blocks)[name], depth, batch_size)
                if turn:  # in the first, code is loaded and caches fill
                    measured[name].append(peaks)
    for name in names:
        of_blocks = list(zip(*measured[name], strict=True))
        for k, (memory, peaks) in enumerate(zip(counted[name], of_blocks, strict=True)):
            counted_mib = memory.total_bytes / MIB
            spread = Spread.of([peak / MIB for peak in peaks])
            report.add(f"K = {num_blocks}, {name}, block {k} (counted {counted_mib:.0f})", spread, "MiB")
        rows.append(_row(num_blocks, name, counted[name], of_blocks))
    return rows


def _row(num_blocks: int, name: str, counted: Sequence[BlockMemory], measured: Sequence[Sequence[int]]) -> str:
    def listed(values: Sequence[float], unit: Callable[[float], str] = "{:.0f}".format) -> str:
        return " ".join(unit(value / MIB) for value in values)

    medians = [Spread.of(list(map(float, peaks))).median for peaks in measured]
    return f"| {num_blocks} | {name} | {listed([memory.total_bytes for memory in counted])} | {listed(medians)} |"


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=3)
    report = Report("pipeline_memory", arguments)
    depth, batch_size, numbers = (14, 8, (2,)) if arguments.quick else (32, 64, range(2, 9))
    rows = [row for num_blocks in numbers for row in compare(report, num_blocks, depth, batch_size)]
    head = ["| K | way to train | MiB in each block, counted | measured |", "|---|---|---|---|"]
    report.finish("\n".join(head + rows), "docs/pipelining.md")


if __name__ == "__main__":
    main()
