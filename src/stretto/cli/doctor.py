"""`stretto doctor`: what of this machine will hurt a training run."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from stretto.cli.terminal import check_writable, fail, write_json
from stretto.console import console
from stretto.profile.doctor import VERSION, Check, judge, look, torch_is_usable, verdict


def doctor(
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Write what was found here; "-" prints it instead.')
    ] = None,
) -> None:
    """Look at versions, cores, memory and GPUs, and say what of it will hurt a training run.

    The exit code is 1 if torch cannot be imported or is too old, else 0.
    """
    try:
        check_writable(json_file)
        facts = look()
        checks = judge(facts)
        record = {"version": VERSION, "verdict": verdict(checks), "checks": [asdict(check) for check in checks]}
        if str(json_file) != "-":
            terminal = console(sys.stdout)
            terminal.print(verdict(checks), style="bold")
            terminal.print(_table(checks))
        if json_file is not None:
            write_json(record, json_file)
    except (ValueError, OSError) as error:
        fail("doctor", error, 2)
    raise typer.Exit(0 if torch_is_usable(facts) else 1)


def _table(checks: list[Check]) -> Table:
    """What hurts, then the rest."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in sorted(checks, key=lambda check: check.hurts is None):
        mark = Text("ok", style="green") if check.hurts is None else Text("hurts", style="bold red")
        text = Text(check.value)
        if check.hurts is not None:
            text.append(f"\n{check.hurts}", style="yellow")
        table.add_row(mark, Text(check.name), text)
    return table
