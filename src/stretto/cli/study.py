"""`stretto study`: how many fresh examples a training needs with and without echo, everything else re-tuned."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.progress
import typer
from rich.console import Console
from rich.text import Text

from stretto.cli.terminal import check_writable, fail, write_json
from stretto.console import console
from stretto.profile import view

if TYPE_CHECKING:
    from stretto.echo.factor import Factor
    from stretto.study.processes import Job
    from stretto.study.records import Task
    from stretto.study.run import Run
    from stretto.study.search import Progress, Search, Watcher
    from stretto.study.summary import Report

_INTERRUPTED = 130  # as shells say of a command that Ctrl-C ended
_REDRAW_S = 0.2


def study(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.py", help="Defines study = stretto.study.Study(train, ...).")
    ],
    variants: Annotated[
        str | None,
        typer.Option(
            help="Insertion points: none,batch,after,before, and workers, which needs a torch DataLoader. Default: "
            "all but workers."
        ),
    ] = None,
    factors: Annotated[str, typer.Option(help='Uses of each example: numbers, or "auto".')] = "2,4",
    buffers: Annotated[str | None, typer.Option(help="Buffers, in batches. Default: the study's.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Batch sizes. Default: the study's.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="Settings tried in each condition.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="Repeats of each condition's best.")] = 3,
    to_target: Annotated[
        bool,
        typer.Option("--to-target", help="Repeats end at the target: quicker, without the final metric."),
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    storage: Annotated[
        Path | None, typer.Option(help="The study's state, an SQLite file. Default: FILE.study.db beside the file.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(help="A file that gets a line of JSON for each run; runs that it has are not made again."),
    ] = None,
    retry_crashed: Annotated[
        bool, typer.Option("--retry-crashed", help="Make the runs that crashed again.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Write the report here; "-" prints it instead.')
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table here, in Markdown.")
    ] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", help="Write a picture of the fresh examples here.")
    ] = None,
) -> None:
    """Find how many fresh examples a training needs to a target, without echo and with it.

    Learning rate and decay are tuned in each condition with the same number of trials, and the best is repeated
    with fresh seeds. A study that was ended goes on where it stopped; so does the same command in another terminal.
    """
    try:
        for path in (runs, json_file, markdown_file, svg_file):
            check_writable(path)
        from stretto.study.conditions import plan
        from stretto.study.processes import Job, ends_on_terminate, one_thread
        from stretto.study.report import markdown, svg
        from stretto.study.storage import check_installed
        from stretto.study.study import load_study
        from stretto.study.summary import summarise
        from stretto.study.verdict import all_failed

        check_installed()
        with one_thread(), ends_on_terminate():
            found = load_study(file)
            conditions = plan(
                found,
                _factors(factors),
                None if variants is None else _split(variants),
                _counts("--buffers", buffers),
                _counts("--batch-sizes", batch_sizes),
            )
            storage = file.with_suffix(".study.db") if storage is None else storage
            job = Job(file, tuple(conditions), storage, trials, seeds, not to_target, runs)
            with job.search(found) as search:
                if retry_crashed:
                    search.retry_crashed()
                _work(job, search, processes)
                report = summarise(found, search.outcomes())
        if str(json_file) != "-":
            _show(report)
        if json_file is not None:
            write_json(report.to_plain(), json_file)
        if markdown_file is not None:
            markdown_file.write_text(markdown(report) + "\n", encoding="utf-8")
        if svg_file is not None:
            svg_file.write_text(svg(report), encoding="utf-8")
        if all_failed(report.rows):
            raise typer.Exit(1)
    except typer.Exit:  # a RuntimeError too
        raise
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        fail("study", error, 2)


def _work(job: "Job", search: "Search", num_processes: int) -> None:
    """Make all runs, under a progress bar. Ends the process if it is interrupted."""
    from stretto.study.processes import work_together

    terminal = console(sys.stderr)
    try:
        with _Bar(terminal, num_processes) as bar:
            if num_processes == 1:
                search.work(_hands(search, bar))
            else:
                work_together(job, search, num_processes, bar.show)
    except KeyboardInterrupt:
        done = search.progress()
        terminal.print(
            f"Interrupted: {done.num_done} of {done.num_wanted} runs are made and kept in {job.storage}. The same "
            f"command goes on: {shlex.join(['stretto', *sys.argv[1:]])}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(_INTERRUPTED) from None


def _hands(search: "Search", bar: "_Bar") -> "Watcher":
    """What tells the bar of the runs of this process."""
    from stretto.study.search import Watcher

    class Hands(Watcher):
        def begins(self, task: "Task") -> None:
            bar.show(search.progress(), f"{task.condition.title}: {task.key}")

        def updates(self, task: "Task", fresh_examples: int, value: float | None) -> None:  # noqa: ARG002
            shown = "" if value is None else f", {value:.4g}"
            bar.move(min(1.0, fresh_examples / search.study.max_fresh_examples), shown)

        def ends(self, task: "Task", run: "Run") -> None:
            bar.end(search.progress(), f"{task.condition.title}: {task.key}: {_ending(run)}")

    return Hands()


class _Bar:
    """A progress bar with the time left on a terminal, lines elsewhere."""

    def __init__(self, terminal: Console, num_processes: int) -> None:
        self._terminal = terminal
        self._num_processes = num_processes
        self._progress = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.fields[counts]}", markup=False),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=terminal,
            disable=not terminal.is_terminal,
        )
        self._task = self._progress.add_task("", counts="")
        self._done: Progress | None = None
        self._doing = ""
        self._began_s = time.monotonic()
        self._moved_s = 0.0

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show(self, done: "Progress", doing: str | None = None) -> None:
        """Where all processes are; `doing`: the run that this one begins."""
        is_new = self._done is None or (done.num_done, done.running) != (self._done.num_done, self._done.running)
        self._done, self._doing = done, doing or "; ".join(done.running)
        if is_new or doing:
            self._began_s = time.monotonic()
        if is_new and doing is None:
            self.say(self._doing)
        self.move(0.0, "")

    def end(self, done: "Progress", line: str) -> None:
        """A run of this process is over."""
        self._done = done
        self._began_s = time.monotonic()
        self.say(line)

    def move(self, part: float, value: str) -> None:
        """This process's run has spent that part of its budget, and has this metric value."""
        now = time.monotonic()
        if self._done is None or (part and now - self._moved_s < _REDRAW_S):
            return
        self._moved_s = now
        self._progress.update(
            self._task,
            total=self._done.num_wanted,
            completed=self._done.num_done + part,
            description=self._doing + value,
            counts=self._counts(now - self._began_s),
        )

    def say(self, line: str) -> None:
        """A line where there is no terminal."""
        if not self._terminal.is_terminal and line:
            self._terminal.print(f"[{self._counts(0.0)}] {line}", markup=False, soft_wrap=True)

    def _counts(self, elapsed_s: float) -> str:
        if self._done is None:
            return ""
        counts = f"{self._done.num_done} of {self._done.num_wanted} runs"
        if self._done.seconds_left is None:
            return counts
        left_s = max(0.0, self._done.seconds_left / self._num_processes - elapsed_s)
        return f"{counts}, {view.duration(float(f'{left_s:.2g}'))} left"


def _ending(run: "Run") -> str:
    from stretto.study.cause import cause

    if run.status == "reached":
        return f"reached with {run.fresh_examples:,} fresh examples, {run.updates:,} updates"
    if run.status == "missed":
        return f"missed the target, best value {view.number(run.best)}"
    return f"{run.status}, {cause(run.error or '')}"


def _show(report: "Report") -> None:
    from stretto.study.report import tables, warnings

    terminal = console(sys.stdout)
    terminal.print(Text(report.verdict, style="bold"))
    for table in tables(report):
        terminal.print(table)
        terminal.print()
    terminal.print(Text("Mean (lowest .. highest) of the seeds.", style="dim"))
    for warning in warnings(report):
        terminal.print(Text(f"Note: {warning}", style="yellow"))
    terminal.print(Text(report.next_step))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _factors(text: str) -> "list[Factor]":
    try:
        return ["auto" if part == "auto" else float(part) for part in _split(text)]
    except ValueError:
        raise ValueError(f'--factors {text}: expected numbers > 1 or "auto", separated by commas: 2,4') from None


def _counts(option: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in _split(text)]
    except ValueError:
        raise ValueError(f"{option} {text}: expected integers >= 1, separated by commas: 16,64") from None
