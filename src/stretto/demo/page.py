"""The demonstration's HTML page: one self-contained file, no network."""

from pathlib import Path
from typing import Any

from stretto.plots import check_installed, label, render, styled

__all__ = ["accuracy_figure", "check_installed", "write_page"]

_COLOURS = {"none": "#8a8f98", "batch": "#d98c21", "after": "#4a90c2", "before": "#2a9d6f", "auto": "#8e5ba6"}


def write_page(record: dict[str, Any], path: Path) -> None:
    """Write the page of a record that `stretto.demo.run.run` returned.

    Raises RuntimeError if plotly or jinja2 is missing.
    """
    check_installed()
    import plotly.graph_objects as go  # noqa: PLC0415  (an optional dependency)

    figures = {
        "accuracy_seconds": accuracy_figure(go, record, "seconds", "seconds of training"),
        "accuracy_fresh": accuracy_figure(go, record, "fresh_examples", "fresh examples"),
        "time": _time(go, record),
    }
    page = render("stretto.demo", "page.html.j2", figures, record=record, colours=_COLOURS)
    path.write_text(page, encoding="utf-8")


def accuracy_figure(go: Any, record: dict[str, Any], clock: str, title: str) -> Any:
    """Test accuracy against one of the two clocks, a line for each run."""
    figure = go.Figure()
    for run in record["runs"]:
        points = run["curve"]
        figure.add_scatter(
            x=[point[clock] for point in points],
            y=[point["accuracy"] for point in points],
            name=label(run["title"]),
            legendgroup=run["condition"],
            showlegend=run["seed"] == 0,
            mode="lines",
            line={"color": _COLOURS[run["condition"]], "width": 2.5},
            hovertemplate="%{y:.1f} % at %{x:,.0f}",
        )
        if run["reached"]:
            figure.add_scatter(
                x=[points[-1][clock]],
                y=[points[-1]["accuracy"]],
                legendgroup=run["condition"],
                showlegend=False,
                mode="markers",
                marker={"color": _COLOURS[run["condition"]], "size": 9},
                hoverinfo="skip",
            )
    target = record["job"]["target_percent"]
    figure.add_hline(y=target, line={"dash": "dot", "color": "#666"}, annotation_text=f"target {target:g} %")
    accuracies = [p["accuracy"] for run in record["runs"] for p in run["curve"]] or [0.0]
    lowest = max(min(accuracies), min(60.0, target - 10))
    figure.update_yaxes(title="test accuracy, %", range=[lowest, max(*accuracies, target) + 1.5])
    figure.update_xaxes(title=title, rangemode="tozero")
    return styled(figure)


def _time(go: Any, record: dict[str, Any]) -> Any:
    """Where the time of each condition went, averaged over the seeds."""
    figure = go.Figure()
    rows = record["rows"][::-1]
    for part, title, colour in (
        ("step_s", "update steps", "#33415c"),
        ("draw_s", "draw and augment", "#e9c46a"),
        ("wait_s", "waiting for data", "#c9ccd1"),
    ):
        means = []
        for row in rows:
            mine = [run[part] for run in record["runs"] if run["condition"] == row["condition"]]
            means.append(sum(mine) / len(mine))
        figure.add_bar(
            y=[label(row["title"]) for row in rows],
            x=means,
            name=title,
            orientation="h",
            marker={"color": colour},
            hovertemplate="%{x:.1f} s",
        )
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(title="seconds to the end of the run")
    return styled(figure)
