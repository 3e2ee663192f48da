"""A study's report as a table for the terminal, as Markdown, and as a picture."""

import math
from collections.abc import Sequence
from html import escape

from rich.table import Table
from rich.text import Text

from stretto.profile import view
from stretto.study.rows import Row, Spread
from stretto.study.summary import Report

_STATUSES = ("reached", "missed", "diverged", "crashed")


def tables(report: Report) -> list[Table]:
    """For the terminal: the results, and how they were found."""
    found = []
    for titles, *rows in (_results(report), _tuning(report)):
        one = Table(box=None, pad_edge=False)
        for at, title in enumerate(titles):
            one.add_column(title, justify="right" if at else "left")
        for cells in rows:
            one.add_row(*map(Text, cells))
        found.append(one)
    return found


def markdown(report: Report) -> str:
    """The same tables in Markdown, without a line end behind them."""
    return "\n\n".join(map(markdown_table, (_results(report), _tuning(report))))


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """Titles and rows as Markdown; the first column is to the left."""
    titles, *rows = cells
    lines: list[Sequence[str]] = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def warnings(report: Report) -> list[str]:
    """All warnings, each with its condition."""
    return [f"{row.title}: {warning}" for row in report.rows for warning in row.warnings]


def svg(report: Report) -> str:
    """Fresh examples to the target by condition, as an SVG document that needs nothing else, for any page.

    A bar is the mean over the repeats, the line on it lowest to highest, the dashed mark no echo's mean / e.
    """
    means = {row.condition: row.fresh_examples.mean for row in report.rows if row.fresh_examples is not None}
    longest = max((row.fresh_examples.high for row in report.rows if row.fresh_examples is not None), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    bottom = _TOP + _ROW * len(report.rows)
    title = f"Fresh examples to {report.study.goal}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 12}" role="img" '
        f'aria-label="{escape(title)}, by condition">',
        f"<style>{_CSS}</style>",
        f'<text class="title" x="8" y="22">{escape(title)}</text>',
        f'<text class="note" x="8" y="42">{_LEGEND}</text>',
    ]
    for at, row in enumerate(report.rows):
        y = _TOP + _ROW * at
        parts.append(f'<text x="8" y="{y + 18}">{escape(row.title)}</text>')
        if row.fresh_examples is None:
            parts.append(f'<text class="note" x="{_LEFT}" y="{y + 18}">{escape(_missed(row))}</text>')
            continue
        parts += _bar(row, row.fresh_examples, y, scale)
        base = next(
            (
                means[other.condition]
                for other in report.rows
                if other.condition.variant == "none"
                and other.condition.batch_size == row.condition.batch_size
                and other.condition in means
            ),
            None,
        )
        if base is not None and row.ideal is not None and row.ideal < 1:
            x = _LEFT + base * row.ideal * scale
            parts.append(f'<path class="ideal" d="M{x:.1f} {y - 1}v{_BAR + 2}"/>')
    return "\n".join([*parts, "</svg>\n"])


_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 900, 290, 130, 58, 34, 24  # pixels
_LEGEND = "bar: mean, line: lowest to highest of the seeds, dashed: no echo / e"
_CSS = """
text{font:14px system-ui,sans-serif;fill:#24292f}
.title{font-weight:600;font-size:16px}
.note{font-size:12px;fill:#57606a}
.bar{fill:#2f6cbf}
.range{stroke:#e08a3c;stroke-width:2;fill:none}
.ideal{stroke:#24292f;stroke-width:2;stroke-dasharray:3 3;fill:none}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9da7b1}.ideal{stroke:#e6edf3}}
"""


def _bar(row: Row, count: Spread, y: int, scale: float) -> list[str]:
    low, high = _LEFT + count.low * scale, _LEFT + count.high * scale
    label = f"{count.mean:,.0f}" + ("" if row.ratio is None else f" ({row.ratio:.2f})")
    width, middle = max(1.0, count.mean * scale), y + _BAR / 2
    ends = f"M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10"
    return [
        f'<rect class="bar" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3"/>',
        f'<path class="range" d="M{low:.1f} {middle}H{high:.1f}{ends}"/>',
        f'<text class="note" x="{high + 8:.1f}" y="{y + 17}">{label}</text>',
    ]


def _results(report: Report) -> list[list[str]]:
    """Titles and rows as text: what each condition needs."""
    titles = ["condition", "fresh examples", "N(e) / N(1)", "1 / e", "updates", "seconds"]
    has_final = any(row.final is not None for row in report.rows)
    titles += [f"{report.study.metric} at {_budget(report):,} fresh"] * has_final
    rows = []
    for row in report.rows:
        if row.fresh_examples is None:
            cells = [row.title, _missed(row), "-", _number(row.ideal), "-", "-"]
        else:
            cells = [
                row.title,
                spread(row.fresh_examples) + _part(row.repeats["reached"], row),
                "1" if row.condition.variant == "none" else _number(row.ratio),
                _number(row.ideal),
                spread(row.updates),
                spread(row.seconds, decimals=1),
            ]
        if has_final:
            cells.append(spread(row.final, decimals=_decimals(report.rows)) + _part(row.num_final, row))
        rows.append(cells)
    return [titles, *rows]


def _tuning(report: Report) -> list[list[str]]:
    """Titles and rows as text: how the trials ended, and the settings that were best."""
    titles = ["condition", *(f"trials {status}" for status in _STATUSES)]
    titles += [f"best {name}" for name in report.study.ranges] + ["AU %"]
    rows = []
    for row in report.rows:
        counts = [str(row.trials[status]) for status in _STATUSES]
        best = [_number(None if row.params is None else row.params[name]) for name in report.study.ranges]
        rows.append([row.title, *counts, *best, spread(row.au_percent)])
    return [titles, *rows]


def _budget(report: Report) -> int:
    return report.study.evaluate_budget or report.study.max_fresh_examples


def _missed(row: Row) -> str:
    if not sum(row.repeats.values()) and not any(row.trials.values()):
        return "not run yet"
    if (
        row.trials["missed"] + row.repeats["missed"] == 0
        and not any(row.repeats.values())
        and not row.trials["reached"]
    ):
        return "all trials diverged or crashed"
    if row.trials["reached"] and not any(row.repeats.values()):
        return "not repeated yet"
    in_trials = f", but in {row.trials['reached']} trials" if row.trials["reached"] else ""
    return f"never reached{in_trials} (best value {view.number(row.best_value)})"


def _decimals(rows: Sequence[Row]) -> int:
    """As many as tell the final values to four digits."""
    largest = max((abs(row.final.high) for row in rows if row.final is not None), default=1.0)
    return 1 if largest == 0 else max(0, 3 - math.floor(math.log10(largest)))


def _part(num_seeds: int, row: Row) -> str:
    """Of how many seeds a value is, unless it is of none or all."""
    num_repeats = sum(row.repeats.values())
    return f"; {num_seeds} of {num_repeats} seeds" if 0 < num_seeds < num_repeats else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def spread(value: Spread | None, decimals: int = 0) -> str:
    """Mean (lowest .. highest)."""
    if value is None:
        return "-"
    return f"{value.mean:,.{decimals}f} ({value.low:,.{decimals}f} .. {value.high:,.{decimals}f})"
