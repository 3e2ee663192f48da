"""`stretto plan`: how to split a model over several devices, and what that is predicted to bring."""

import contextlib
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from stretto.cli.terminal import check_writable, fail, write_json
from stretto.console import console
from stretto.profile import view

if TYPE_CHECKING:
    from stretto.pipelining.memory import MakeOptimizer
    from stretto.pipelining.plan import Plan
    from stretto.pipelining.spec import Staleness

VERSION = 1
_MOST_DRAWN = 40
"""Batches under way in a picture of some screens."""
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.001}),
    "adamw": ("AdamW", {"lr": 0.001}),
    "nadam": ("NAdam", {"lr": 0.001}),
    "rmsprop": ("RMSprop", {"lr": 0.001}),
    "adagrad": ("Adagrad", {"lr": 0.01}),
}


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:NAME]",
            help="Where NAME (default: model) is an nn.Sequential, a list of modules or a function that makes one, "
            "and sample is a batch for it or a function that makes one.",
        ),
    ],
    devices: Annotated[int, typer.Option(min=1, help="How many devices to split it over.")],
    hop_ms: Annotated[float, typer.Option(min=0, help="Latency between two of them, in milliseconds.")] = 0.0,
    by: Annotated[Literal["time", "parameters", "uniform"], typer.Option(help="What the cut balances.")] = "time",
    m: Annotated[
        str | None, typer.Option("--m", help='The staleness to plan for: "3,2,1,0" or "DSP(0,0; 1,0; stashed)".')
    ] = None,
    optimizer: Annotated[str, typer.Option(help=f"Whose state to count: {', '.join(_OPTIMIZERS)}.")] = "momentum",
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Write the plan here; "-" prints it instead.')
    ] = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the picture of the schedule here.")] = None,
) -> None:
    """Plan how to split a model over several devices with layer-wise staleness.

    Its layers are measured on this machine, on copies. Speed and memory are predictions.
    """
    progress = console(sys.stderr)
    try:
        for written in (json_file, svg_file):
            check_writable(written)
        make_optimizer = _optimizer(optimizer)
        from stretto.pipelining import plan as planning
        from stretto.pipelining.drawing import schedule_svg

        path, _, name = source.partition(":")
        file, name = Path(path), name or "model"
        model, sample, made = _load(file, name)
        staleness = None if m is None else _staleness(m, devices)
        with progress.status("Measuring the layers ..."):
            if not progress.is_terminal:
                progress.print("Measuring the layers ...")
            found = planning.plan(
                model,
                sample,
                devices,
                hop_s=hop_ms / 1e3,
                by=by,
                staleness=staleness,
                optimizer=make_optimizer,
            )
        if str(json_file) != "-":
            _show(found, _next_step(found, file, name, made, optimizer), has_batch_norm=_has_batch_norm(model))
        if json_file is not None:
            write_json(_to_plain(found), json_file)
        if svg_file is not None:
            picture = schedule_svg(found.staleness, found.times, hop_s=found.hop_s)
            svg_file.write_text(picture, encoding="utf-8")
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        fail("plan", error, 2)


def _load(file: Path, name: str) -> tuple[Any, Any, str]:
    """The model and the sample of a file, made if they are functions, and how the model was got.

    Raises ValueError where one is missing, RuntimeError where the file or a function fails.
    """
    from torch import nn

    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    sys.path.insert(0, str(file.resolve().parent))  # as python FILE.py does
    names = _try(f"{file} fails", lambda: runpy.run_path(str(file), run_name="__stretto_plan__"))
    found = []
    for wanted, what in ((name, "an nn.Sequential, a list of modules"), ("sample", "a batch for the model")):
        if wanted not in names:
            raise ValueError(f"{file} defines no {wanted}: expected {what}, or a function that makes one")
        value = names[wanted]
        is_function = callable(value) and not isinstance(value, nn.Module)
        found.append(_try(f"{wanted}() of {file} fails", value) if is_function else value)
    return found[0], found[1], name if names[name] is found[0] else f"{name}()"


def _has_batch_norm(model: Any) -> bool:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    parts = model if isinstance(model, list | tuple) else [model]
    return any(isinstance(part, _BatchNorm) for part in nn.ModuleList(parts).modules())


def _try(what: str, call: Callable[[], Any]) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what is printed there is no part of the plan
            return call()
    except (Exception, SystemExit) as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error


def _staleness(text: str, devices: int) -> "Staleness":
    from stretto.pipelining.spec import Staleness

    if text.strip().startswith("DSP"):
        return Staleness.of(devices, m=Staleness.parse(text))
    try:
        ages = [int(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(f'--m {text}: expected numbers such as "3,2,1,0", or "DSP(0,0; 1,0)"') from None
    return Staleness.of(devices, m=ages)


def _optimizer(name: str) -> "MakeOptimizer":
    if name not in _OPTIMIZERS:
        raise ValueError(f"--optimizer {name}: expected {', '.join(_OPTIMIZERS)}")
    from torch import optim

    kind, arguments = _OPTIMIZERS[name]
    return lambda parameters: getattr(optim, kind)(parameters, **arguments)


def _verdict(found: "Plan") -> str:
    devices = f"{len(found.blocks)} device{'s' * (len(found.blocks) > 1)}"
    if found.staleness.m[0] == 0:
        return f"Nothing to gain from staleness on {devices}."
    return (
        f"{found.staleness} on {devices}: predicted {view.times(found.chosen.speedup)} one device, "
        f"{view.times(found.speedup_over_split)} split backpropagation"
    )


def _show(found: "Plan", next_step: str, *, has_batch_norm: bool) -> None:
    from stretto.pipelining.drawing import schedule_text

    terminal = console(sys.stdout)
    best = found.best_exact
    terminal.print(Text(_verdict(found), style="bold"))
    terminal.print(Text(f"Why this m: {found.why}."))
    quickest = (
        f"The quickest without staleness: {best.name} ({best.detail}), {view.times(best.speedup)} one device."
    )
    terminal.print(Text(quickest))
    if found.staleness.m[0] and not found.gains:
        advice = "It is as quick or quicker, and trains as one device does: take it if your batches can be split."
        if has_batch_norm:
            advice += " Your batch norm would see one micro-batch at a time."
        terminal.print(Text(advice, style="yellow"))
    for table in (_blocks(found), _memory(found), _ways(found)):
        terminal.print()
        terminal.print(table)
    terminal.print()
    if found.staleness.m[0] > _MOST_DRAWN:
        terminal.print(
            Text(f"With m_0 = {found.staleness.m[0]} the picture is too long for a terminal: see --svg.")
        )
    else:
        width = max(60, terminal.width)
        picture = schedule_text(found.staleness, found.times, hop_s=found.hop_s, width=width)
        terminal.print(picture, soft_wrap=True)
    note = (
        "Predicted from layers timed one by one on this machine, without loss and optimizer. "
        "A micro-batch is taken to cost its share of a batch."
    )
    terminal.print()
    terminal.print(Text(note, style="dim"))
    terminal.print()
    terminal.print(Text(next_step), soft_wrap=True)


def _table(*titles: str) -> Table:
    """The first column to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for at, title in enumerate(titles):
        table.add_column(title, justify="right" if at else "left")
    return table


def _blocks(found: "Plan") -> Table:
    table = _table("block", "layers", "parameters", "forward", "backward", "busy")
    for at, block in enumerate(found.blocks):
        last = f" to {block.last_layer}" * (block.num_layers > 1)
        table.add_row(
            f"{at}",
            Text(f"{block.first_layer}{last} ({block.num_layers})"),
            view.count(block.num_parameters),
            view.duration(block.forward_s),
            view.duration(block.backward_s),
            view.percent(100 * block.utilisation),
        )
    return table


def _memory(found: "Plan") -> Table:
    """What each block holds; parts that no block has are left out."""
    rows = [asdict(block.memory) for block in found.blocks]
    parts = [name for name in rows[0] if any(row[name] for row in rows)]
    table = _table("block", "memory", *(name.removesuffix("_bytes") for name in parts))
    for at, (block, row) in enumerate(zip(found.blocks, rows, strict=True)):
        table.add_row(f"{at}", view.size(block.memory.total_bytes), *(view.size(row[name]) for name in parts))
    return table


def _ways(found: "Plan") -> Table:
    table = _table("on the same devices", "", "a batch", "over one device", "largest block", "layers", "gradients")
    for at, way in enumerate(found.best_of_each):
        table.add_row(
            way.name,
            way.detail,
            view.duration(way.seconds_per_batch),
            view.times(way.speedup),
            view.size(way.largest_block_bytes),
            "+".join(map(str, way.num_layers)),
            "exact" if way.is_exact else "stale",
            style="" if at else "bold",
        )
    return table


def _next_step(found: "Plan", file: Path, name: str, made: str, optimizer: str) -> str:
    if found.staleness.K == 1:
        return "Next: plan for two devices or more."
    if found.staleness.m[0] == 0:
        return "Next: split the largest layer into several, or train on fewer devices."
    num_blocks, spec = len(found.blocks), found.staleness
    layers = tuple(block.num_layers for block in found.blocks)
    kind, settings = _OPTIMIZERS[optimizer]
    arguments = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"""Next, in a script under torchrun --nproc-per-node {num_blocks}, with your loss_fn and loader:

    import torch
    import torch.distributed as dist
    from {file.stem} import {name}
    from stretto.pipelining import ScheduleDSP, partition

    dist.init_process_group()
    torch.manual_seed(0)  # the same model everywhere
    rank = dist.get_rank()
    block = partition({made}, {num_blocks}, by={layers})[rank]
    optimizer = torch.optim.{kind}(block.parameters(), {arguments})
    with ScheduleDSP((block, rank, {num_blocks}), optimizer, loss_fn, m="{spec}") as schedule:
        for x, y in schedule.feed(loader):
            schedule.step(x, target=y)
        schedule.flush()"""


def _to_plain(found: "Plan") -> Any:
    """Plain values, what is derived from them too."""
    record = {
        "version": VERSION,
        "verdict": _verdict(found),
        "specification": str(found.staleness),
        "speedup_over_split": found.speedup_over_split,
        "best_exact": f"{found.best_exact.name} ({found.best_exact.detail})",
        **asdict(found),
    }
    for block, plain in zip(found.blocks, record["blocks"], strict=True):
        plain["memory"]["total_bytes"] = block.memory.total_bytes
    return record
