"""`stretto demo`: a training job starved by a slow object store, with and without data echoing."""

import signal
import sys
import time
import webbrowser
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stretto.cli.terminal import check_writable, fail, write_json
from stretto.console import console
from stretto.demo.conditions import Condition
from stretto.demo.page import check_installed, write_page
from stretto.demo.race import Outcome
from stretto.demo.run import Display, Plan, run

_CHANCE = 10.0  # percent: ten classes
_PLAIN_EVERY_S = 5.0


class _Progress(Display):
    """Progress bars on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[accuracy]:5.1f} %  stall {task.fields[stall]:3.0f} %"),
            TextColumn("[dim]{task.fields[counts]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._last_line_s = 0.0

    def __enter__(self) -> "_Progress":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def say(self, message: str) -> None:
        self._console.print(message)

    def begin(self, condition: Condition, seed: int, target: float) -> None:
        name = condition.title if seed == 0 else f"{condition.title} (seed {seed})"
        if not self._console.is_terminal:
            self.say(name)
        self._task = self._progress.add_task(
            f"{name:<30}", total=target - _CHANCE, accuracy=0.0, stall=0.0, counts=""
        )

    def update(self, outcome: Outcome) -> None:
        accuracy = outcome.curve[-1].accuracy if outcome.curve else 0.0
        counts = f"{outcome.updates:,} updates, {outcome.fresh_examples:,} fresh"
        self._progress.update(
            self._task,
            completed=max(0.0, accuracy - _CHANCE),
            accuracy=accuracy,
            stall=outcome.stall_percent,
            counts=counts,
        )
        if outcome.reached:
            self._progress.stop_task(self._task)
        now = time.monotonic()
        if not self._console.is_terminal and (outcome.reached or now - self._last_line_s > _PLAIN_EVERY_S):
            self._last_line_s = now
            self.say(f"  {accuracy:.1f} %, stall {outcome.stall_percent:.0f} %, {counts}")


def demo(
    ratio: Annotated[float, typer.Option(help="R = t_up / t_down that the slow link is set to.")] = 6.0,
    target: Annotated[float, typer.Option(help="Test accuracy in percent that ends a run.")] = 83.0,
    seeds: Annotated[int, typer.Option(help="Runs of each condition.")] = 1,
    only: Annotated[
        str | None, typer.Option(help="Conditions, separated by commas: none,batch,after,before,auto.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Your own store, s3://... or http://...; no server is started."),
    ] = None,
    upload: Annotated[bool, typer.Option("--upload", help="Write the shards to --store first.")] = False,
    max_updates: Annotated[int, typer.Option(help="A run that has not reached the target ends here.")] = 4000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    html_file: Annotated[Path, typer.Option("--html", help="Write the page here.")] = Path("stretto-demo.html"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Train from a slow object store to one accuracy: without echoing, and with it at every insertion point."""
    terminal = console(sys.stdout)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        plan = Plan(
            ratio=ratio,
            target=target,
            seeds=seeds,
            store=store,
            upload=upload,
            names=None if only is None else [name.strip() for name in only.split(",")],
            max_updates=max_updates,
        )
        check_installed()
        for path in (json_file, html_file):
            check_writable(path)
        with _Progress(terminal) as progress:
            record = run(plan, progress)
        terminal.print(_table(record))
        terminal.print(record["summary"], style="bold")
        if json_file is not None:
            write_json(record, json_file)
        write_page(record, html_file)
        terminal.print(f"Plots: {html_file}", markup=False, soft_wrap=True)
    except (ValueError, RuntimeError, OSError) as error:
        fail("demo", error, 1)
    if show:
        webbrowser.open(html_file.resolve().as_uri())


def _table(record: dict[str, Any]) -> Table:
    seeds = record["job"]["seeds"]
    speeds = record["speeds"]
    table = Table(
        title=f"To {record['job']['target_percent']:g} % on Fashion-MNIST, R = {speeds['ratio']:.2f}"
        + (f", medians of {seeds} seeds" if seeds > 1 else ""),
        title_style="bold",
    )
    table.add_column("condition")
    for title in ("settings", "fresh examples", "updates", "seconds", "AU %", "speed-up"):
        table.add_column(title, justify="right")
    for row in record["rows"]:
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        table.add_row(
            row["title"],
            row["settings"],
            f"{row['fresh_examples']:,.0f}",
            f"{row['updates']:,.0f}",
            f"{row['seconds']:.1f}",
            f"{row['au_percent']:.0f}",
            speedup if row["reached"] else f"stopped at {row['accuracy']:.1f} %",
        )
    return table


def _terminate(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Let SIGTERM end the `with` blocks as Ctrl-C does."""
    raise KeyboardInterrupt
