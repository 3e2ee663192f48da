"""`stretto run`: a training script, unchanged, measured and if asked for echoed."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.terminal import check_writable, fail, say_error, write_json
from stretto.console import console

PASS_ON = {"allow_interspersed_args": False}
"""What follows the program's name is the program's own, with or without a -- before it."""


def run(
    command: Annotated[list[str], typer.Argument(help="What trains: -- python train.py ..., -- torchrun ...")],
    echo: Annotated[
        str | None, typer.Option(help='Echo training loaders: uses of each example, a number >= 1, or "auto".')
    ] = None,
    steps: Annotated[int | None, typer.Option(help="End the run after so many updates.")] = None,
    workers: Annotated[int | None, typer.Option(help="num_workers of the training loaders.")] = None,
    prefetch: Annotated[int | None, typer.Option(help="prefetch_factor of the training loaders.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as a page here.")] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace here that ui.perfetto.dev opens.")
    ] = None,
) -> None:
    """Run a training script unchanged: what it waits for, and what to do about it.

    The script's output and exit code are its own; the report goes to the standard error.
    """
    from stretto.launch.options import RunOptions, parse_factor
    from stretto.launch.parent import end_as, script_run
    from stretto.plots import check_installed
    from stretto.profile.html.page import write_page
    from stretto.profile.report import print_report
    from stretto.profile.spans import trace_events
    from stretto.profile.trace import write_trace

    try:
        for path in (json_file, html_file, trace_file):
            check_writable(path)
        if html_file is not None:
            check_installed()
        options = RunOptions(echo=parse_factor(echo), steps=steps, workers=workers, prefetch=prefetch)
        with script_run(command, options) as finished:
            record = finished.record
            errors = []
            if json_file is not None:
                errors += _try(lambda path: write_json(record, path), json_file)
            if html_file is not None:
                errors += _try(lambda path: write_page(record, path), html_file)
            if trace_file is not None:
                errors += _try(lambda path: write_trace(path, events=trace_events(finished.directory)), trace_file)
    except (ValueError, RuntimeError, OSError) as error:
        fail("run", error, 2)
    try:
        print_report(record, console(sys.stderr))
        for problem in errors:
            say_error("run", problem)
    except OSError:  # whoever read it has gone: the script's exit code stays its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise typer.Exit(end_as(record) or (2 if errors else 0))


def _try(write: Callable[[Path], None], path: Path) -> list[str]:
    """Write a file of the run's. A long run's other files do not depend on it."""
    try:
        write(path)
    except (ValueError, RuntimeError, OSError) as error:
        return [f"{path} could not be written: {error}"]
    return []
