"""`stretto prove`: whether the advice makes a script's updates quicker, in pairs of runs without and with it."""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from stretto.cli.terminal import check_writable, fail, write_json
from stretto.console import console
from stretto.launch.options import RunOptions, parse_factor
from stretto.launch.parent import end_as, script_run
from stretto.profile import view
from stretto.profile.compare import slowest
from stretto.profile.prove import (
    Pair,
    Proof,
    check_run,
    first_to_try,
    last_metric,
    metric_pattern,
    to_text,
    why_nothing_to_try,
)
from stretto.profile.prove import prove as judge
from stretto.profile.schema import RunRecord

VERSION = 1
_NOTHING = "nothing to try"


def prove(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(help="What trains: -- python train.py ..., -- torchrun ...")],
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of runs, one without and one with the change.")] = 5,
    echo: Annotated[
        str | None, typer.Option(help='Echo training loaders: uses of each example, a number >= 1, or "auto".')
    ] = None,
    workers: Annotated[int | None, typer.Option(help="num_workers of the training loaders.")] = None,
    prefetch: Annotated[int | None, typer.Option(help="prefetch_factor of the training loaders.")] = None,
    steps: Annotated[int | None, typer.Option(help="End every run after so many updates.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="One group, a number: its last match in the output tells the quality."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Write the proof here; "-" prints it instead.')
    ] = None,
) -> None:
    """Run a script without and with a change in pairs, and say whether its updates became quicker.

    Without --echo, --workers or --prefetch the first run decides what is tried. The script's output is shown if it
    fails, and its exit code is then the command's.
    """
    try:
        check_writable(json_file)
        pattern = None if metric is None else metric_pattern(metric)
        change = RunOptions(echo=parse_factor(echo), workers=workers, prefetch=prefetch, steps=steps)
        series = _Series(ctx, command, change, pattern, pairs)
        found = list(series.run())
        proof = judge(found, series.change) if found else None
        if str(json_file) != "-":
            _show(proof, found, series)
        if json_file is not None:
            write_json(_to_plain(proof, found, series), json_file)
    except (ValueError, OSError) as error:
        fail("prove", error, 2)


class _Series:
    """The runs, and what is changed in every second one."""

    def __init__(
        self,
        ctx: typer.Context,
        command: list[str],
        change: RunOptions,
        pattern: re.Pattern[str] | None,
        num_pairs: int,
    ) -> None:
        self.command = command
        self.change = change
        self.why_nothing: str | None = None
        self._ctx = ctx
        self._pattern = pattern
        self._num_pairs = num_pairs
        self._num_runs = 0
        self._first: RunRecord | None = None
        self._progress = console(sys.stderr)

    def run(self) -> Iterator[Pair]:
        """The pairs, the order swapped in every second one; none if there is nothing to try."""
        plain = RunOptions(steps=self.change.steps)
        for number in range(self._num_pairs):
            if number % 2 == 0:
                without, metric_without = self._run(plain)
                if self.change == plain and not self._choose(without):
                    return
            with_change, metric_with = self._run(self.change)
            if number % 2 == 1:
                without, metric_without = self._run(plain)
            yield Pair(
                without=without, with_change=with_change, metric_without=metric_without, metric_with=metric_with
            )

    def _choose(self, record: RunRecord) -> bool:
        """Take the first advice that can be tried; False if there is none."""
        advice = first_to_try(record)
        if advice is None:
            self.why_nothing = why_nothing_to_try(record)
            return False
        assert advice["command"] is not None
        arguments = [*shlex.split(advice["command"]), "--", *self.command]
        asked = self._ctx.command.make_context("prove", arguments).params
        self.change = RunOptions(
            echo=parse_factor(asked["echo"]),
            workers=asked["workers"],
            prefetch=asked["prefetch"],
            steps=self.change.steps,
        )
        self._progress.print(Text(f"To try: {advice['title']} ({to_text(self.change)})"))
        return True

    def _run(self, options: RunOptions) -> tuple[RunRecord, float | None]:
        """One run's record and metric. Ends the process as the script did if that failed."""
        with script_run(self.command, options, capture=True) as done:
            record, output = done.record, done.output
        if record["exit_code"] != 0:
            sys.stderr.write(output)
            self._progress.print(Text("stretto prove: the script failed, so there is no proof.", style="red"))
            raise typer.Exit(end_as(record))
        check_run(record, self._first)
        self._first = self._first or record
        self._num_runs += 1
        rank = slowest(record)
        named = f"with {to_text(options)}" if to_text(options) else "without"
        self._progress.print(
            f"[{self._num_runs}/{2 * self._num_pairs}] {named}: {rank['updates']:,} updates, "
            f"{view.duration(rank['s_per_update'])} each, {view.duration(record['seconds'])} in all",
            markup=False,
        )
        return record, None if self._pattern is None else last_metric(self._pattern, output)


def _show(proof: Proof | None, pairs: list[Pair], series: _Series) -> None:
    terminal = console(sys.stdout)
    if proof is None:
        terminal.print(Text(_NOTHING, style="bold"))
        terminal.print(Text(f"{series.why_nothing}"))
        return
    change = to_text(series.change)
    terminal.print(Text(f"{proof.verdict} the updates per second with {change}", style="bold"))
    table = Table(box=None, pad_edge=False)
    for title in ("pair", "update without", f"with {change}", "ratio", "whole command"):
        table.add_column(title, justify="right")
    for number, pair in enumerate(pairs, start=1):
        each = [view.duration(slowest(record)["s_per_update"]) for record in (pair.without, pair.with_change)]
        table.add_row(str(number), *each, f"{pair.ratio:.2f}x", f"{pair.command_ratio:.2f}x")
    terminal.print(table)
    whole = proof.command_speedup
    terminal.print(f"Whole command: {whole.value:.2f}x ({whole.low:.2f} .. {whole.high:.2f})")
    if (quality := proof.quality) is not None:
        difference = quality.difference
        seen = "no difference is proven" if difference.holds(0) else "it differs"
        terminal.print(
            f"Metric: {quality.mean_without:g} without, {quality.mean_with:g} with, difference "
            f"{difference.value:+.4g} ({difference.low:+.4g} .. {difference.high:+.4g}): {seen}"
        )
    for note in proof.notes:
        terminal.print(Text(f"Note: {note}", style="yellow"))
    terminal.print(Text(_next_step(proof, series)))


def _next_step(proof: Proof, series: _Series) -> str:
    if proof.speedup.low > 1:
        return f"Next: stretto run {to_text(series.change)} -- {shlex.join(series.command)}"
    if proof.speedup.high < 1:
        return "Next: leave it, or try another change."
    return "Next: leave it, or narrow the interval with longer runs or more --pairs."


def _to_plain(proof: Proof | None, pairs: list[Pair], series: _Series) -> dict[str, object]:
    return {
        "version": VERSION,
        "command": series.command,
        "options": asdict(series.change),
        **({"verdict": _NOTHING, "notes": [series.why_nothing]} if proof is None else asdict(proof)),
        "pairs": [
            {
                "updates": slowest(pair.without)["updates"],
                "s_per_update_without": slowest(pair.without)["s_per_update"],
                "s_per_update_with": slowest(pair.with_change)["s_per_update"],
                "seconds_without": pair.without["seconds"],
                "seconds_with": pair.with_change["seconds"],
                "metric_without": pair.metric_without,
                "metric_with": pair.metric_with,
            }
            for pair in pairs
        ],
    }
