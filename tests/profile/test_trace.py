"""The trace, read back as a viewer reads it."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.profile.trace import Counter, Span, write_trace


def span(begin_s: float, end_s: float, thread: int = 0, process: int = 0, name: str = "update") -> Span:
    return Span(process, f"rank {process}", thread, f"lane {thread}", name, begin_s, end_s, {"batch": 3})


def written(path: Path, *events: Span | Counter) -> list[dict]:
    write_trace(path / "trace.json", events=events)
    return json.loads((path / "trace.json").read_text(encoding="ascii"))["traceEvents"]


def test_spans_are_complete_events_in_microseconds_after_the_earliest(tmp_path: Path) -> None:
    events = written(tmp_path, span(101.5, 101.75), span(101.0, 101.5, name="wait"))
    assert [event for event in events if event["ph"] == "X"] == [
        {
            "ph": "X",
            "name": name,
            "cat": "lane 0",
            "pid": 0,
            "tid": 0,
            "ts": begin,
            "dur": duration,
            "args": {"batch": 3},
        }
        for name, begin, duration in (("wait", 0.0, 500_000.0), ("update", 500_000.0, 250_000.0))
    ]


def test_processes_and_threads_are_named_before_their_spans(tmp_path: Path) -> None:
    events = written(tmp_path, span(0, 1, thread=7), span(0, 1, thread=3), span(0, 1, process=1))
    named = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert named == [
        ("process_name", 0, 0, "rank 0"),
        ("thread_name", 0, 0, "lane 3"),
        ("thread_name", 0, 1, "lane 7"),
        ("process_name", 1, 0, "rank 1"),
        ("thread_name", 1, 0, "lane 0"),
    ]
    assert [e["ph"] for e in events] == ["M", "M", "X", "M", "X", "M", "M", "X"]


def test_counters_are_counter_events(tmp_path: Path) -> None:
    events = written(tmp_path, Counter(2, "R", 10.0, 3.5), Counter(2, "R", 10.25, 4.0))
    assert events == [
        {"ph": "C", "name": "R", "pid": 2, "tid": 0, "ts": 0.0, "args": {"value": 3.5}},
        {"ph": "C", "name": "R", "pid": 2, "tid": 0, "ts": 250_000.0, "args": {"value": 4.0}},
    ]


def test_no_events_are_a_trace_too(tmp_path: Path) -> None:
    assert written(tmp_path) == []


def test_names_from_the_script_are_escaped(tmp_path: Path) -> None:
    name = '"</script>\\ \n\udcff [red]'
    events = written(tmp_path, span(0, 1, name=name))
    assert events[-1]["name"] == name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 10), st.integers(0, 1), st.integers(0, 1)),
        min_size=1,
        max_size=30,
    )
)
def test_spans_of_a_thread_lie_apart_or_inside_each_other(tmp_path: Path, drawn: list) -> None:
    spans = [span(begin, begin + length, thread, process) for begin, length, thread, process in drawn]
    events = [event for event in written(tmp_path, *spans) if event["ph"] == "X"]
    assert len(events) == len(spans)
    enclosing: dict[tuple[int, int], list[int]] = {}
    previous: dict[tuple[int, int], int] = {}
    for event in events:
        # What a viewer does: it reads whole nanoseconds.
        begin, end = round(event["ts"] * 1e3), round(event["ts"] * 1e3) + round(event["dur"] * 1e3)
        thread = (event["pid"], event["tid"])
        assert 0 <= previous.get(thread, 0) <= begin <= end
        previous[thread] = begin
        ends = enclosing.setdefault(thread, [])
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1]
        ends.append(end)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_before_anything_is_written(tmp_path: Path, value: float) -> None:
    argument = Span(0, "rank 0", 0, "updates", "update", 0.0, 1.0, {"loss": value})
    for event in (
        span(value, 1.0),
        span(0.0, value),
        argument,
        Counter(0, "R", value, 1.0),
        Counter(0, "R", 0, value),
    ):
        with pytest.raises(ValueError, match=f"is {value}, expected a finite number"):
            write_trace(tmp_path / "trace.json", events=[span(0, 1), event])
    assert not (tmp_path / "trace.json").exists()


def test_a_span_that_ends_before_it_begins_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'update': ends at 1\.0 s, before it begins at 2\.0 s"):
        write_trace(tmp_path / "trace.json", events=[span(2.0, 1.0)])
