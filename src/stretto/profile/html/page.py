"""A run's HTML page: one self-contained file, no network."""

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.plots import check_installed, label, render, styled
from stretto.profile import view
from stretto.profile.pipeline import HELPS_FROM_R
from stretto.profile.schema import AdviceRecord, RankRecord, RunRecord
from stretto.profile.worth import MEASURED_ON

# Told apart by readers who see no red or no green, on white and on black.
COLOURS = {
    "update_s": "#2a9d8f",
    "wait_s": "#e08a3c",
    "first_wait_s": "#c8553d",
    "transfer_s": "#8e6fc1",
    "other_s": "#9aa1ab",
}
_FACTOR, _RATIO = "#3f7fd1", "#c0568c"
_LABEL_WIDTH = 24  # characters in a line of a bar's label, so that a phone has room for the bar
_MAX_LEGEND = 12


def write_page(record: RunRecord, path: Path) -> None:
    """Write the page of a record.

    Raises RuntimeError if plotly or jinja2 is missing.
    """
    check_installed()
    import plotly.graph_objects as go  # noqa: PLC0415  (an optional dependency)

    rank = view.waiting_rank(record)
    advice = [each for each in record["advice"] if view.is_shown(each["speedup"])]
    points = view.insertion_points(record)
    figures: dict[str, Any] = {}
    if rank is not None and rank["timeline"]:
        figures["timeline"] = _timeline(go, rank)
        figures["factor"] = _factor(go, rank)
    if sum(bool(each["timeline"]) for each in record["ranks"]) > 1:
        figures["ranks"] = _ranks(go, record["ranks"])
    if points:
        figures["ratios"] = _ratios(go, points)
    if advice:
        figures["gains"] = _gains(go, advice)
    page = render(
        "stretto.profile.html",
        "page.html.j2",
        figures,
        record=record,
        rank=rank,
        command=shlex.join(record["command"]),
        view=view,
        colours=COLOURS,
        helps_from_r=HELPS_FROM_R,
        measured_on=MEASURED_ON,
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _timeline(go: Any, rank: RankRecord) -> Any:
    """What each part of the run was spent on, in percent: the lowest layer is AU %."""
    windows = [window for window in rank["timeline"] if window["seconds"] > 0]
    figure = go.Figure()
    for key, title in (("update_s", "update steps: AU %"), ("wait_s", "waiting"), ("other_s", "other")):
        figure.add_bar(
            x=[window["t"] + window["seconds"] / 2 for window in windows],
            y=[100 * window[key] / window["seconds"] for window in windows],  # type: ignore[literal-required]
            width=[window["seconds"] for window in windows],
            name=title,
            marker={"color": COLOURS[key], "line": {"width": 0}},
            customdata=[view.duration(window[key]) for window in windows],  # type: ignore[literal-required]
            hovertemplate="%{y:.1f} %, %{customdata}",
        )
    figure.update_layout(barmode="stack", bargap=0, hovermode="x unified", legend={"traceorder": "normal"})
    figure.update_yaxes(title="% of the time", range=[0, 100])
    figure.update_xaxes(title="seconds since the command began", hoverformat=".1f")
    return _calm(figure, 320)


def _ranks(go: Any, ranks: Sequence[RankRecord]) -> Any:
    """AU % of every rank over the run."""
    figure = go.Figure()
    for rank in ranks:
        windows = [window for window in rank["timeline"] if window["seconds"] > 0]
        figure.add_scatter(
            x=[window["t"] + window["seconds"] / 2 for window in windows],
            y=[100 * window["update_s"] / window["seconds"] for window in windows],
            name=f"rank {rank['rank']}",
            mode="lines",
            hovertemplate="%{y:.1f} %",
        )
    figure.update_layout(showlegend=len(ranks) <= _MAX_LEGEND, hovermode="x unified")
    figure.update_yaxes(title="AU %", range=[0, 100])
    figure.update_xaxes(title="seconds since the command began", hoverformat=".1f")
    return _calm(figure, 280)


def _factor(go: Any, rank: RankRecord) -> Any:
    """Above the stall in percent, below it the factor and R."""
    windows = [window for window in rank["timeline"] if window["seconds"] > 0]
    ends = [window["t"] + window["seconds"] for window in windows]
    mode = "lines" if len(windows) > 1 else "markers"
    figure = go.Figure()
    figure.add_scatter(
        x=ends,
        y=[100 * window["wait_s"] / window["seconds"] for window in windows],
        name="stall %",
        mode=mode,
        fill="tozeroy",
        line={"color": COLOURS["wait_s"], "width": 2},
        yaxis="y2",
        hovertemplate="%{y:.1f} %",
    )
    ratios = [window["ratio"] if view.is_shown(window["ratio"]) else None for window in windows]
    factors = [window["factor"] for window in windows]
    for name, values, colour in (("R", ratios, _RATIO), ("echoing factor", factors, _FACTOR)):
        figure.add_scatter(
            x=ends, y=values, name=name, mode=mode, line={"color": colour, "width": 2}, hovertemplate="%{y:.2f}"
        )
    figure.update_layout(
        hovermode="x unified",
        yaxis={"domain": [0, 0.44], "title": "R, factor", "rangemode": "tozero"},
        yaxis2={"domain": [0.56, 1], "title": "stall %", "range": [0, 100]},
    )
    figure.update_xaxes(title="seconds since the command began", hoverformat=".1f", anchor="y")
    return _calm(figure, 360)


def _ratios(go: Any, points: Sequence[tuple[str, float]]) -> Any:
    """R at every insertion point, and the line below which echoing cannot help."""
    figure = go.Figure()
    figure.add_bar(
        x=[ratio for _, ratio in points],
        y=list(range(len(points))),
        orientation="h",
        width=0.6,
        marker={
            "color": [COLOURS["update_s" if ratio >= HELPS_FROM_R else "other_s"] for _, ratio in points],
            "line": {"width": 0},
        },
        text=[view.number(ratio) for _, ratio in points],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure.add_vline(
        x=HELPS_FROM_R,
        line={"dash": "dot", "color": "#808894"},
        annotation_text=f"R = {HELPS_FROM_R:g}",
        annotation_position="top",
    )
    figure.update_xaxes(title="R = t_up / t_down", range=[0, max(1.15 * max(ratio for _, ratio in points), 2)])
    return _rows(figure, [name for name, _ in points], 54)


def _gains(go: Any, advice: Sequence[AdviceRecord]) -> Any:
    """The speed-up that each advice is predicted to give."""
    figure = go.Figure()
    measured = f"at the worth measured on {MEASURED_ON}"
    for name, values, colour, offset in (
        ("if each use were worth 1", [each["speedup"] for each in advice], COLOURS["update_s"], -0.36),
        (measured, [each["speedup_measured"] for each in advice], _FACTOR, 0.02),
    ):
        figure.add_bar(
            x=[value if view.is_shown(value) else None for value in values],
            y=list(range(len(advice))),
            name=name,
            orientation="h",
            width=0.34,
            offset=offset,
            marker={"color": colour, "line": {"width": 0}},
            text=[view.times(value) if view.is_shown(value) else "" for value in values],
            textposition="outside",
            cliponaxis=False,
            hoverinfo="skip",
        )
    figure.add_vline(x=1, line={"dash": "dot", "color": "#808894"})
    shown = [value for each in advice for value in (each["speedup"], each["speedup_measured"]) if value is not None]
    figure.update_layout(legend={"traceorder": "normal"})
    figure.update_xaxes(title="times as fast (1: as it ran)", range=[0, max(1.2 * max(shown), 1.5)])
    return _rows(figure, [each["title"] for each in advice], 74)


def _rows(figure: Any, names: Sequence[str], row_height: int) -> Any:
    """A horizontal bar chart, its bars numbered from the top and named."""
    figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[_wrapped(name) for name in names],
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        automargin=True,
        ticklabelstandoff=6,
    )
    figure = _calm(figure, 120 + row_height * len(names))
    return figure.update_layout(margin={"l": 10})


def _wrapped(name: str) -> str:
    lines = textwrap.wrap(name, _LABEL_WIDTH, max_lines=3, placeholder=" ...")
    return "<br>".join(label(line) for line in lines)


def _calm(figure: Any, height: int) -> Any:
    """The common look, on the page's own background."""
    clear = "rgba(0,0,0,0)"
    figure.update_xaxes(title_font_size=13)
    figure.update_yaxes(title_font_size=13)
    return styled(figure, height).update_layout(
        paper_bgcolor=clear, plot_bgcolor=clear, margin={"l": 55, "r": 15, "t": 40}
    )
