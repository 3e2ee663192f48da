"""`stretto compare`: two records of runs, side by side."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from stretto.cli.terminal import check_writable, fail, write_json
from stretto.console import console
from stretto.profile import view
from stretto.profile.compare import Comparison, Row, compare, read_record

VERSION = 1


def compare_records(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A record that `stretto run --json` wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="The record to compare with it.")],
    max_regression_pct: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 1 if B's time per update exceeds A's by more percent than this."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Write the comparison here; "-" prints it instead.')
    ] = None,
) -> None:
    """Put two records side by side: time per update, stall, waits, stages.

    The exit code is 1 on a regression beyond --max-regression-pct, 2 if a record cannot be used, else 0.
    """
    try:
        check_writable(json_file)
        found = compare(read_record(a), read_record(b))
        is_regression = max_regression_pct is not None and found.slowdown_percent > max_regression_pct
        if str(json_file) != "-":
            _show(found, a, b, max_regression_pct if is_regression else None)
        if json_file is not None:
            write_json(_to_plain(found, is_regression=is_regression), json_file)
    except (ValueError, OSError) as error:
        fail("compare", error, 2)
    raise typer.Exit(1 if is_regression else 0)


def _show(found: Comparison, a: Path, b: Path, exceeded_pct: float | None) -> None:
    terminal = console(sys.stdout)
    terminal.print(Text(found.verdict, style="bold"))
    if exceeded_pct is not None:
        regression = f"{found.slowdown_percent:.1f} % more time per update, at most {exceeded_pct:g} % are allowed."
        terminal.print(Text(f"Regression: {regression}", style="bold red"))
    terminal.print(Text(f"A  {a}\nB  {b}", style="dim"))
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in ("A", "B", "change"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in found.rows:
        word, style = {True: ("better", "green"), False: ("worse", "red"), None: ("", "")}[row.is_better]
        table.add_row(
            Text(row.name), _value(row.a, row.unit), _value(row.b, row.unit), _change(row), Text(word, style=style)
        )
    terminal.print(table)
    for caveat in found.caveats:
        terminal.print(Text(f"Note: {caveat}", style="yellow"))


def _value(value: float | None, unit: str) -> str:
    if unit in ("s", "ms"):
        return view.duration(value if value is None or unit == "s" else value / 1e3)
    return view.percent(value) if unit == "%" else view.number(value, unit)


def _change(row: Row) -> str:
    if row.change is None:
        return "-"
    return f"{row.change:+.1f} {'points' if row.unit == '%' else '%'}"


def _to_plain(found: Comparison, *, is_regression: bool) -> dict[str, object]:
    rows = [{**asdict(row), "change": row.change, "is_better": row.is_better} for row in found.rows]
    return {"version": VERSION, **asdict(found), "rows": rows, "is_regression": is_regression}
