"""The record of a run on a terminal: the verdict, where the time went, the evidence, the advice, the next step.

Nothing of the record is read as markup: its names, paths and messages come from the script.
"""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from stretto.profile import view
from stretto.profile.schema import AdviceRecord, LoaderRecord, RankRecord, RunRecord
from stretto.profile.worth import MEASURED_ON

_WIDE = 100  # columns that the table of advice needs
_MEDIUM = 80  # columns that the table of ranks needs
_STYLES = {
    "update_s": "green",
    "wait_s": "red",
    "first_wait_s": "yellow",
    "transfer_s": "magenta",
    "other_s": "dim",
}
_BLOCKS = {"update_s": "█", "wait_s": "░", "first_wait_s": "▒", "transfer_s": "▓", "other_s": "·"}
_NARROW_STAGE = ("time", "computing", "waiting")
_ASCII_BLOCKS = {"update_s": "#", "wait_s": ".", "first_wait_s": ":", "transfer_s": "=", "other_s": "-"}


def print_report(record: RunRecord, console: Console) -> None:
    """Print the report of a record; readable from 40 columns on, and without colours."""
    _Report(record, console).print()


class _Report:
    def __init__(self, record: RunRecord, console: Console) -> None:
        self._record = record
        self._console = console
        self._blocks = _BLOCKS if console.encoding.lower().startswith("utf") else _ASCII_BLOCKS

    def print(self) -> None:
        record = self._record
        self._say(record["verdict"], "bold")
        if (ending := view.ending(record)) is not None:
            self._say(ending, "red")
        self._items(view.endings(record))
        if any(rank["time"]["total_s"] for rank in record["ranks"]):
            self._heading("Where the time went")
            self._show(self._time_table() if self._console.width >= _MEDIUM else self._time_lines())
            if record["straggler"] is not None:
                self._say(record["straggler"], "yellow")
        if record["evidence"]:
            self._heading("Evidence")
            self._items(record["evidence"])
        for loader in view.staged_loaders(view.waiting_rank(record)):
            self._heading(f"Making examples: {loader['name']} over {loader['dataset']}")
            self._show(self._stages(loader))
        self._advice()
        if record["findings"]:
            self._heading("Also found")
            self._items(record["findings"])
        self._next_step()

    def _next_step(self) -> None:
        self._heading("Next step")
        self._say(self._record["next_step"])
        if (found := view.to_try(self._record)) is not None:
            title, command = found
            self._say(f"To try without an edit ({title}):")
            # Whole, so that it can be copied; the terminal wraps it.
            self._console.print(self._text(f"  {command}", "cyan"), soft_wrap=True)

    def _time_table(self) -> Table:
        """A row for each rank: a bar, and every part in percent."""
        table = _table("rank")
        table.add_column("", no_wrap=True)
        for key, title in view.TIME_PARTS:
            header = Text(f"{self._blocks[key]} {title}", _STYLES[key])
            table.add_column(header, justify="right", no_wrap=key != "first_wait_s")
        table.add_column("total", justify="right", no_wrap=True)
        if self._console.width >= _WIDE:
            table.add_column("updates/s", justify="right")
        width = min(40, self._console.width - (84 if self._console.width >= _WIDE else 70))
        for rank in self._record["ranks"]:
            cells: list[RenderableType] = [str(rank["rank"]), self._bar(rank, width)]
            cells += [view.percent(part) for part in _shares(rank)]
            cells.append(view.duration(rank["time"]["total_s"]))
            if self._console.width >= _WIDE:
                cells.append(view.number(rank["updates_per_s"]))
            table.add_row(*cells)
        return table

    def _time_lines(self) -> Iterable[RenderableType]:
        """The same for a narrow terminal."""
        for rank in self._record["ranks"]:
            total = view.duration(rank["time"]["total_s"])
            yield Text(f"rank {rank['rank']}, {total}, {view.number(rank['updates_per_s'])} updates/s")
            yield self._bar(rank, min(60, self._console.width))
            line = Text()
            for (key, title), part in zip(view.TIME_PARTS, _shares(rank), strict=True):
                words = Text(f"{self._blocks[key]} {title} {view.percent(part)}", _STYLES[key])
                if line and line.cell_len + 2 + words.cell_len > self._console.width:
                    yield line
                    line = Text()
                line.append("  " if line else "").append_text(words)
            yield line

    def _bar(self, rank: RankRecord, width: int) -> Text:
        """The parts of a rank's time in blocks, `width` of them in all."""
        bar = Text()
        done = 0.0
        for (key, _), part in zip(view.TIME_PARTS, _shares(rank), strict=True):
            begin, done = done, done + (part or 0.0)
            bar.append(self._blocks[key] * (round(done * width / 100) - round(begin * width / 100)), _STYLES[key])
        return bar

    def _stages(self, loader: LoaderRecord) -> Table:
        """Each stage, split into computing and waiting; the bars show its part of a batch."""
        is_wide = self._console.width >= _MEDIUM
        width = 40 if self._console.width >= _WIDE else 16
        table = _table("stage")
        if is_wide:
            table.add_column("", no_wrap=True)
        for title in ("of a batch", "time", "computing", "waiting", "gives") if is_wide else _NARROW_STAGE:
            table.add_column(title, justify="right")
        for stage in view.stages(loader):
            cells: list[RenderableType] = [self._text(stage.name)]
            percent = stage.computing_percent + stage.waiting_percent
            if is_wide:
                split = [round(width * part / 100) for part in (stage.computing_percent, percent)]
                bar = Text(self._blocks["update_s"] * split[0], _STYLES["update_s"])
                cells.append(bar.append(self._blocks["wait_s"] * (split[1] - split[0]), _STYLES["wait_s"]))
                cells.append(view.percent(percent))
            cells += [view.milliseconds(x) for x in (stage.wall_ms, stage.computing_ms, stage.waiting_ms)]
            if is_wide:
                cells.append(view.size(stage.item_bytes))
            table.add_row(*cells)
        return table

    def _advice(self) -> None:
        advice = [advice for advice in self._record["advice"] if advice["action"] != "none"]
        if not advice:
            # A verdict that nothing need be done gives its reason.
            self._items(f"{advice['title']}: {advice['why']}" for advice in self._record["advice"])
            return
        self._heading("What would help, predicted")
        self._show(self._advice_table(advice) if self._console.width >= _WIDE else self._advice_lines(advice))
        if any(view.is_shown(x["speedup_measured"]) for x in advice):
            self._say(
                "Speed-up: to a target, if each use of an example were worth a fresh one. "
                f"Measured: at the worth of a repeated use as measured on {MEASURED_ON}.",
                "dim",
            )

    def _advice_table(self, advice: list[AdviceRecord]) -> Table:
        table = _table("what")
        for title in ("R", "factor", "buffer", "updates/s", "fresh examples/s", "speed-up", "measured"):
            table.add_column(title, justify="right")
        for number, each in enumerate(advice, 1):
            table.add_row(
                self._text(f"{number}. {each['title']}"),
                view.number(each["ratio"]),
                view.number(each["factor"]),
                view.buffer(each),
                view.number(each["updates_per_s"]),
                view.number(each["fresh_per_s"]),
                view.times(each["speedup"]),
                view.times(each["speedup_measured"]),
            )
        return table

    def _advice_lines(self, advice: list[AdviceRecord]) -> Iterable[RenderableType]:
        """The same for a narrow terminal: what has no number is left out."""
        for number, each in enumerate(advice, 1):
            facts = {
                "R": view.number(each["ratio"]),
                "factor": view.number(each["factor"]),
                "buffer": view.buffer(each),
                "updates/s": view.number(each["updates_per_s"]),
                "fresh examples/s": view.number(each["fresh_per_s"]),
                "speed-up": view.times(each["speedup"]),
                "measured": view.times(each["speedup_measured"]),
            }
            row = Table.grid(padding=(0, 1))
            row.add_row(f"{number}.", self._text(each["title"]))
            row.add_row("", ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact != "-"))
            yield row

    def _text(self, text: str, style: str = "") -> Text:
        """Text of the record as it is, with what a terminal would obey or could not print spelled out."""
        visible = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
        encoding = self._console.encoding
        return Text(visible.encode(encoding, "backslashreplace").decode(encoding), style)

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(self._text(text, style))

    def _heading(self, text: str) -> None:
        self._console.print()
        self._say(text, "bold")

    def _items(self, texts: Iterable[str]) -> None:
        for text in texts:
            row = Table.grid(padding=(0, 1))
            row.add_row("-", self._text(text))
            self._console.print(row)

    def _show(self, parts: Table | Iterable[RenderableType]) -> None:
        for part in [parts] if isinstance(parts, Table) else parts:
            self._console.print(part)


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column(first, overflow="fold")
    return table


def _shares(rank: RankRecord) -> list[float | None]:
    """Each part of a rank's time in percent."""
    return [view.share(rank["time"][key], rank["time"]["total_s"]) for key, _ in view.TIME_PARTS]
