"""A run as Chrome Trace Event JSON, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a thread of a process did from one time to another."""

    process: int
    process_name: str
    thread: int
    thread_name: str
    name: str
    begin_s: float
    end_s: float
    args: dict[str, str | int | float | None]
    """What a click on it shows."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A value that a process had from a time on."""

    process: int
    name: str
    t_s: float
    value: float


def write_trace(path: Path, *, events: Sequence[Span | Counter]) -> None:
    """Write spans and counters, in any order; times are written in microseconds after the earliest of them.

    A viewer nests the spans of a thread. Those that overlap without lying inside each other go to further threads
    of the same name. Raises ValueError, before it writes anything, for a number that is not finite and for a span
    that ends before it begins.
    """
    for event in events:
        _check(event)
    start_s = min((_begin_s(event) for event in events), default=0.0)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for entry in _entries(events, start_s):
            file.write(separator + json.dumps(entry, allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


def _check(event: Span | Counter) -> None:
    if isinstance(event, Span):
        numbers = {"begin_s": event.begin_s, "end_s": event.end_s}
        numbers |= {name: value for name, value in event.args.items() if isinstance(value, float)}
    else:
        numbers = {"t_s": event.t_s, "value": event.value}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{event.name!r}: {name} is {value}, expected a finite number; leave the event out")
    if isinstance(event, Span) and event.end_s < event.begin_s:
        raise ValueError(
            f"{event.name!r}: ends at {event.end_s} s, before it begins at {event.begin_s} s; "
            "take both from the same clock"
        )


def _begin_s(event: Span | Counter) -> float:
    return event.begin_s if isinstance(event, Span) else event.t_s


def _entries(events: Sequence[Span | Counter], start_s: float) -> Iterator[dict[str, Any]]:
    """The objects of the file: a process at a time, the spans of a thread by the time they begin."""
    spans = sorted(
        (event for event in events if isinstance(event, Span)),
        key=lambda span: (span.process, span.thread, span.begin_s, -span.end_s),
    )
    for process, of_process in groupby(spans, key=lambda span: span.process):
        num_threads = 0
        for _, of_thread in groupby(of_process, key=lambda span: span.thread):
            first = num_threads
            # For each thread of the file the ends, in nanoseconds, of the spans that enclose the present one.
            open_ends: list[list[int]] = []
            for span in of_thread:
                begin, end = _nanoseconds(span.begin_s, start_s), _nanoseconds(span.end_s, start_s)
                lane = _lane(open_ends, begin, end)
                if first + lane == num_threads:
                    if num_threads == 0:
                        yield _name("process_name", process, 0, span.process_name)
                    yield _name("thread_name", process, num_threads, span.thread_name)
                    num_threads += 1
                yield {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.thread_name,
                    "pid": process,
                    "tid": first + lane,
                    "ts": begin / 1e3,
                    "dur": (end - begin) / 1e3,
                    "args": span.args,
                }
    for event in events:
        if isinstance(event, Counter):
            at = _nanoseconds(event.t_s, start_s) / 1e3
            yield {
                "ph": "C",
                "name": event.name,
                "pid": event.process,
                "tid": 0,
                "ts": at,
                "args": {"value": event.value},
            }


def _lane(open_ends: list[list[int]], begin: int, end: int) -> int:
    """The first of a thread's lanes in which the span is alone or inside another; a new one if there is none."""
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return lane
    open_ends.append([end])
    return len(open_ends) - 1


def _nanoseconds(t_s: float, start_s: float) -> int:
    # Whole, and rounded for both ends alike: spans that touch still touch, and never overlap by a rounding error.
    return round((t_s - start_s) * 1e9)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
