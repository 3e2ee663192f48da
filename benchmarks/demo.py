"""The demonstration over several seeds: to one accuracy with every condition, at R near 6 and at R near 1.

All conditions of a seed run one after the other in one job, seed after seed. Writes the runs beside the figures,
and, when not --quick, the table in README.md and (with a Chromium on PATH) its plot.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from harness import Report, Spread, parse_arguments, write_table

from stretto.demo.conditions import Condition
from stretto.demo.page import accuracy_figure
from stretto.demo.race import Outcome
from stretto.demo.run import Display, Plan, run

_ROOT = Path(__file__).parents[1]


class _Lines(Display):
    """One line for each run."""

    def say(self, message: str) -> None:
        print(f"  {message}", flush=True)

    def begin(self, condition: Condition, seed: int, target: float) -> None:  # noqa: ARG002
        print(f"  seed {seed}, {condition.title}", flush=True)

    def update(self, outcome: Outcome) -> None:
        if outcome.reached:
            print(
                f"    {outcome.seconds:.1f} s, {outcome.updates} updates, {outcome.fresh_examples} fresh examples, "
                f"AU {outcome.au_percent:.0f} %",
                flush=True,
            )


def readme_table(record: dict[str, Any]) -> str:
    """The table of README.md."""
    lines = [
        "| | fresh examples | updates | seconds | AU % | speed-up (lowest .. highest seed) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        speedup = "1"
        if row["condition"] != "none":
            speedup = "target missed"
        if row["condition"] != "none" and row["speedups"]:
            speedup = f"**{row['speedup']:.2f}** ({min(row['speedups']):.2f} .. {max(row['speedups']):.2f})"
        lines.append(
            f"| {row['title']} | {row['fresh_examples']:,.0f} | {row['updates']:,.0f} | {row['seconds']:.1f} | "
            f"{row['au_percent']:.0f} | {speedup} |"
        )
    return "\n".join(lines)


def write_plot(record: dict[str, Any], path: Path) -> None:
    """A picture of accuracy against seconds, drawn by a headless Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("  no Chromium on PATH: the plot is left as it is")
        return
    figure = accuracy_figure(go, record, "seconds", "seconds of training")
    figure.update_layout(width=900, height=400)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plot.html"
        page.write_text(f"<body style='margin:0'>{figure.to_html(full_html=False, config={'staticPlot': True})}")
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", "--window-size=900,400", "--virtual-time-budget=5000"]
        subprocess.run([*command, f"--screenshot={path}", page.as_uri()], check=True, capture_output=True)


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=3)
    report = Report("demo", arguments)
    quick: dict[str, Any] = {"target": 60.0, "max_updates": 300} if arguments.quick else {"target": 85.0}
    starved = run(Plan(seeds=arguments.rounds, **quick), _Lines())
    report.add("R, starved", Spread.of([starved["speeds"]["ratio"]]), "", at_least=5.4, at_most=6.6)
    rows = {row["condition"]: row for row in starved["rows"]}
    speedups = {name: row["speedups"] for name, row in rows.items() if row["speedups"]}
    best = max(("before", "auto"), key=lambda name: rows[name]["speedup"] or 0)
    for name in ("batch", "after", "before", "auto"):
        if name in speedups:
            bar = 4.5 if name == best else None
            report.add(f"speed-up, {rows[name]['title']}", Spread.of(speedups[name]), "x", at_least=bar)
    order = list(zip(*(speedups.get(name, []) for name in ("before", "after", "batch")), strict=False))
    in_order = sum(before > after > batch for before, after, batch in order)
    report.add("seeds with before > after > batch", Spread.of([in_order]), "seeds", at_least=arguments.rounds)
    even = run(Plan(ratio=1.0, names=["none", "before", "auto"], **quick), _Lines())
    report.add("R, even", Spread.of([even["speeds"]["ratio"]]), "", at_least=0.9, at_most=1.1)
    for row in even["rows"][1:]:
        if row["speedups"]:
            report.add(f"speed-up at R near 1, {row['title']}", Spread.of(row["speedups"]), "x")
    report.note(even["summary"])
    report.finish()
    if not arguments.quick:
        runs = _ROOT / "benchmarks/results/demo_runs.json"
        runs.write_text(json.dumps({"starved": starved, "even": even}, indent=1) + "\n")
        write_table("README.md", "demo", readme_table(starved))
        write_plot(starved, _ROOT / "docs/demo.png")


if __name__ == "__main__":
    main()
