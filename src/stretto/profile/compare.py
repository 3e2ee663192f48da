"""Two records of runs, side by side.

A run is as fast as its slowest rank, so that is the one whose numbers are compared.
"""

import json
import math
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from stretto.profile.schema import VERSION, LoaderRecord, RankRecord, RunRecord

MIN_CHANGE = 1.0
"""Percent, or points of a percentage: less counts as no change."""
_MIN_STAGE_CHANGE = 5.0  # percent: the stages that are worth a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A measured value in both records."""

    name: str
    unit: str
    """"s", "ms", "%", "/s", "x" or none."""
    a: float | None
    b: float | None
    lower_is_better: bool | None
    """None where neither direction is good in itself."""

    @property
    def change(self) -> float | None:
        """From A to B: in points where the value is a percentage, in percent of A elsewhere."""
        if self.a is None or self.b is None:
            return None
        if self.unit == "%":
            return self.b - self.a
        return 100 * (self.b / self.a - 1) if math.isfinite(self.a) and self.a else None

    @property
    def is_better(self) -> bool | None:
        """Of B; None where it is about the same, or cannot be said."""
        change = self.change
        if change is None or self.lower_is_better is None or abs(change) < MIN_CHANGE:
            return None
        return (change < 0) == self.lower_is_better


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Of record B with record A."""

    slowdown_percent: float
    """By which B's seconds per update exceed A's; negative if B is faster."""
    verdict: str
    rows: list[Row]
    caveats: list[str]
    """What else differs than what was to be compared."""


def read_record(path: Path) -> RunRecord:
    """The record that `stretto run --json` wrote.

    Raises ValueError, naming the file, if it cannot be read, is no such record, is one of another version, or
    holds no training.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # also of text that is no UTF-8
        raise ValueError(f"{path}: is no JSON, as `stretto run --json` writes it: {error}") from error
    if not isinstance(found, dict) or "version" not in found:
        raise ValueError(f"{path}: is no record of a run: expected a file that `stretto run --json` wrote")
    if found["version"] != VERSION:
        raise ValueError(
            f"{path}: is a record of version {found['version']!r}, expected {VERSION}: run the command again with "
            "this version of stretto"
        )
    _check(found, RunRecord, "", path)
    record: RunRecord = found  # type: ignore[assignment]
    if not has_training(record):
        said = f": {record['verdict']}" if record["verdict"] else ""
        raise ValueError(f"{path}: holds no training that was recognised{said}")
    return record


def has_training(record: RunRecord) -> bool:
    """Whether some rank's time between updates is known."""
    return any(_is_timed(rank) for rank in record["ranks"])


def slowest(record: RunRecord) -> RankRecord:
    """The rank with the most seconds per update."""
    return max(filter(_is_timed, record["ranks"]), key=lambda rank: rank["s_per_update"])


def _is_timed(rank: RankRecord) -> bool:
    return math.isfinite(rank["s_per_update"]) and rank["s_per_update"] > 0


def compare(a: RunRecord, b: RunRecord) -> Comparison:
    """B beside A, both with training in them."""
    rank_a, rank_b = slowest(a), slowest(b)
    seconds = Row(
        name="time per update", unit="s", a=rank_a["s_per_update"], b=rank_b["s_per_update"], lower_is_better=True
    )
    assert seconds.change is not None
    return Comparison(
        slowdown_percent=seconds.change,
        verdict=_verdict(seconds),
        rows=[seconds, *_rank_rows(rank_a, rank_b), *_loader_rows(rank_a, rank_b)],
        caveats=_caveats(a, b),
    )


def _verdict(seconds: Row) -> str:
    assert seconds.a is not None
    assert seconds.b is not None
    if seconds.is_better is None:
        return "B is as fast as A: the time per update differs by less than 1 %."
    if seconds.is_better:
        return f"B is faster: {seconds.a / seconds.b:.2f} times the updates of A in the same time."
    return f"B is slower: an update takes {seconds.b / seconds.a:.2f} times as long as in A."


def _rank_rows(a: RankRecord, b: RankRecord) -> list[Row]:
    def row(name: str, unit: str, key: str, *, lower_is_better: bool) -> Row:
        values = {"a": a[key], "b": b[key]}  # type: ignore[literal-required]
        return Row(name=name, unit=unit, lower_is_better=lower_is_better, **values)

    waits = [
        Row(
            name=f"wait, {name.upper()}",
            unit="ms",
            a=a["wait_ms"][name],
            b=b["wait_ms"][name],
            lower_is_better=True,
        )
        for name in ("p50", "p99")
    ]
    return [
        row("updates", "/s", "updates_per_s", lower_is_better=False),
        row("AU", "%", "au_percent", lower_is_better=False),
        row("stall", "%", "stall_percent", lower_is_better=True),
        *waits,
    ]


def _loader_rows(rank_a: RankRecord, rank_b: RankRecord) -> list[Row]:
    a, b = _training_loader(rank_a), _training_loader(rank_b)
    if a is None or b is None:
        return []
    rows = [
        Row(name="R", unit="", a=a["ratio"], b=b["ratio"], lower_is_better=None),
        Row(name="echoing factor", unit="", a=_factor(a), b=_factor(b), lower_is_better=None),
    ]
    times_a, times_b = ({stage["name"]: stage["wall_ms"] for stage in each["stages"]} for each in (a, b))
    for name in dict.fromkeys([*times_a, *times_b]):
        row = Row(name=f"stage {name}", unit="ms", a=times_a.get(name), b=times_b.get(name), lower_is_better=True)
        if row.change is None or abs(row.change) >= _MIN_STAGE_CHANGE:
            rows.append(row)
    return rows


def _training_loader(rank: RankRecord) -> LoaderRecord | None:
    """The training loader that gave the most batches."""
    loaders = [loader for loader in rank["loaders"] if loader["is_training"]]
    return max(loaders, key=lambda loader: loader["batches"], default=None)


def _factor(loader: LoaderRecord) -> float:
    return loader["echo"]["realised"] if loader["echo"] is not None else 1.0


def _caveats(a: RunRecord, b: RunRecord) -> list[str]:
    def both(what: str, in_a: object, in_b: object) -> list[str]:
        return [] if in_a == in_b else [f"{what} differ: {in_a} in A, {in_b} in B."]

    caveats = [
        *both("The commands", " ".join(a["command"]), " ".join(b["command"])),
        *both("The hosts", a["host"], b["host"]),
        *both("The usable cores", f"{a['cores']:g}", f"{b['cores']:g}"),
        *both("The devices", slowest(a)["device"], slowest(b)["device"]),
        *both("The numbers of ranks", len(a["ranks"]), len(b["ranks"])),
        *both("The versions of torch", a["torch"], b["torch"]),
    ]
    options = [{name: value for name, value in each["options"].items() if value is not None} for each in (a, b)]
    if options[0] != options[1]:
        named = [", ".join(f"{name} {value}" for name, value in each.items()) or "none" for each in options]
        caveats.append(f"The options of stretto run differ: {named[0]} in A, {named[1]} in B.")
    if any(option.get("echo") is not None for option in options):
        caveats.append("With an echo some examples are repeats: an update is not worth what a fresh one is.")
    return caveats


def _check(value: object, expected: Any, where: str, path: Path) -> None:
    """Raise ValueError if `value` has not the type that the schema declares."""
    origin = get_origin(expected)
    if is_typeddict(expected):
        if isinstance(value, dict):
            for name, hint in get_type_hints(expected).items():
                inner = f"{where}.{name}" if where else name
                if name not in value:
                    raise ValueError(f"{path}: is no whole record of a run: {inner} is missing")
                _check(value[name], hint, inner, path)
            return
    elif origin is list:
        if isinstance(value, list):
            for position, item in enumerate(value):
                _check(item, get_args(expected)[0], f"{where}[{position}]", path)
            return
    elif origin in (Union, types.UnionType):
        kinds = get_args(expected)
        if value is None and type(None) in kinds:
            return
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        if len(kinds) == 1:
            _check(value, kinds[0], where, path)
            return
        if isinstance(value, kinds):
            return
    elif expected is float:
        if isinstance(value, int | float):
            return
    elif isinstance(value, origin or expected):
        return
    raise ValueError(f"{path}: is no record of a run: {where} is {value!r}")
