"""What the terminal report and the page both show of a record, and numbers with their units."""

import math
import shlex
from dataclasses import dataclass
from typing import Literal

from stretto.profile.schema import AdviceRecord, LoaderRecord, RankRecord, RunRecord

TimePart = Literal["update_s", "wait_s", "first_wait_s", "transfer_s", "other_s"]
TIME_PARTS: tuple[tuple[TimePart, str], ...] = (
    ("update_s", "update"),
    ("wait_s", "waiting"),
    ("first_wait_s", "first batches"),
    ("transfer_s", "transfer"),
    ("other_s", "other"),
)
"""The parts of a `TimeRecord`, and what they are called."""

_MISSING = "-"
_SECONDS = (
    ("us", 1e-6, 1e-3),
    ("ms", 1e-3, 1.0),
    ("s", 1.0, 120.0),
    ("min", 60.0, 7200.0),
    ("h", 3600.0, math.inf),
)
_BYTES = tuple(
    (unit, 1024.0**k, limit * 1024.0**k)
    for k, unit, limit in ((1, "KiB", 1000), (2, "MiB", 1000), (3, "GiB", 1000), (4, "TiB", math.inf))
)
_POINTS = {"batch": "whole batches", "examples": "examples after the loader"}


def to_try(record: RunRecord) -> tuple[str, str] | None:
    """The first advice that needs no edit of the script: its title, and the command line that tries it.

    None if there is none, and for what `stretto.profile` measured in a program of its own.
    """
    advice = next((advice for advice in record["advice"] if advice["command"]), None)
    if advice is None or "echo" not in record["options"]:
        return None
    return advice["title"], f"stretto run {advice['command']} -- {shlex.join(record['command'])}"


def is_shown(value: float | None) -> bool:
    """Whether there is a number to show: neither None nor NaN nor infinite."""
    return value is not None and math.isfinite(value)


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits and a unit; "-" where there is no number."""
    if value is None or not math.isfinite(value):
        return _MISSING
    rounded = float(f"{value:.3g}")
    decimals = 0 if rounded == 0 else max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}{unit}"


def count(value: float | None) -> str:
    """A number of things, all of its digits: 1,234."""
    return _MISSING if value is None else f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def percent(value: float | None) -> str:
    """Of a value in percent: 12.3 %, with two decimals at most."""
    return number(value if value is None or abs(value) >= 0.005 else 0, " %")


def fraction(value: float | None) -> str:
    """`percent` of a share between 0 and 1."""
    return percent(None if value is None else 100 * value)


def times(value: float | None) -> str:
    """A speed-up: 1.85x."""
    return number(value, "x")


def duration(seconds: float | None) -> str:
    """Of seconds: 12.3 ms, 4.56 s, 78.9 min."""
    return "0 s" if seconds == 0 else _scaled(seconds, _SECONDS)


def milliseconds(value: float | None) -> str:
    """`duration` of milliseconds."""
    return duration(None if value is None else value / 1e3)


def size(num_bytes: float | None) -> str:
    """Of bytes: 512 B, 1.50 KiB, 96.0 MiB."""
    return f"{num_bytes:.0f} B" if num_bytes is not None and num_bytes < 1024 else _scaled(num_bytes, _BYTES)


def _scaled(value: float | None, steps: tuple[tuple[str, float, float], ...]) -> str:
    """In the first unit (name, scale, limit) whose limit the value stays below once it is rounded."""
    if value is None or not math.isfinite(value):
        return _MISSING
    rounded = abs(float(f"{value:.3g}"))
    name, scale = next((name, scale) for name, scale, limit in steps if rounded < limit)
    return number(value / scale, f" {name}")


def share(part: float, total: float) -> float | None:
    """A part in percent of the total, None of nothing."""
    return 100 * part / total if total > 0 else None


def buffer(advice: AdviceRecord) -> str:
    """The buffer of an advice: 8,192 (96.0 MiB)."""
    items, num_bytes = advice["buffer_items"], advice["buffer_bytes"]
    if items is None or num_bytes is None:
        return size(num_bytes) if items is None else count(items)
    return f"{count(items)} ({size(num_bytes)})"


def ending(record: RunRecord) -> str | None:
    """How the command ended, in a sentence; None if it ended well."""
    after = duration(record["seconds"])
    if record["exit_signal"] is not None:
        return (
            f"The command was ended by {record['exit_signal']} after {after}; this is what was recorded until then."
        )
    if record["exit_code"]:
        return (
            f"The command ended with exit code {record['exit_code']} after {after}; "
            "this is what was recorded until then."
        )
    return None


def endings(record: RunRecord) -> list[str]:
    """How each rank ended that did not simply finish."""
    return [f"Rank {rank['rank']}: {rank['ended']}." for rank in record["ranks"] if rank["ended"] != "finished"]


def waiting_rank(record: RunRecord) -> RankRecord | None:
    """The rank that waits the most, which the advice is for; None without ranks."""
    return max(record["ranks"], key=lambda rank: rank["stall_percent"], default=None)


def staged_loaders(rank: RankRecord | None) -> list[LoaderRecord]:
    """The training loaders whose stages were seen."""
    loaders = [] if rank is None else rank["loaders"]
    return [loader for loader in loaders if loader["is_training"] and loader["stages"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageView:
    """A stage, split into computing and waiting: of one example, of a whole batch for collate."""

    name: str
    wall_ms: float
    computing_ms: float
    waiting_ms: float
    item_bytes: float | None
    computing_percent: float
    """Of the time of a whole batch through all stages."""
    waiting_percent: float


def stages(loader: LoaderRecord) -> list[StageView]:
    """The stages of a loader."""
    # A batch goes once through collate, and its examples one by one through all else.
    uses = [1.0 if stage["name"] == "collate" else loader["batch_size"] or 1.0 for stage in loader["stages"]]
    batch_ms = sum(n * stage["wall_ms"] for n, stage in zip(uses, loader["stages"], strict=True)) or 1.0
    found = []
    for n, stage in zip(uses, loader["stages"], strict=True):
        computing_ms = min(stage["cpu_ms"], stage["wall_ms"])
        waiting_ms = stage["wall_ms"] - computing_ms
        found.append(
            StageView(
                name=stage["name"] + (" (a batch)" if stage["name"] == "collate" else ""),
                wall_ms=stage["wall_ms"],
                computing_ms=computing_ms,
                waiting_ms=waiting_ms,
                item_bytes=stage["item_bytes"],
                computing_percent=100 * n * computing_ms / batch_ms,
                waiting_percent=100 * n * waiting_ms / batch_ms,
            )
        )
    return found


def insertion_points(record: RunRecord) -> list[tuple[str, float]]:
    """Each point where an echo could stand, named, and R there."""
    found = {
        advice["where"]: advice["ratio"]
        for advice in reversed(record["advice"])
        if advice["action"] == "echo" and advice["where"] is not None
    }
    points = [(_POINTS.get(where, f"after {where}"), ratio) for where, ratio in reversed(found.items())]
    if not found.keys() & _POINTS.keys():
        rank = waiting_rank(record)
        loaders = [] if rank is None else rank["loaders"]
        named = [loader for loader in loaders if loader["is_training"]]
        points += [(f"after {x['name']}" if len(named) > 1 else "after the loader", x["ratio"]) for x in named]
    return [(name, ratio) for name, ratio in points if ratio is not None and math.isfinite(ratio)]
