"""Every benchmark's short form runs to the end. Nothing is said about times."""

import json
from pathlib import Path

import pytest

from tests.forked import python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    "name",
    [
        *[
            "accuracy",
            "advice",
            "auto_factor",
            "both",
            "echo_gap",
            "fill_rate",
            "fresh_examples",
            "jpeg",
            "memory",
            "meter",
            "overhead",
            "plan",
        ],
        *["pipeline_emulated", "pipeline_memory", "pipeline_speed"],
    ],
)
def test_the_short_form_runs_to_the_end_and_writes_only_where_told(name: str, tmp_path: Path) -> None:
    results = BENCHMARKS / "results"
    before = sorted(results.glob("*"))
    out = tmp_path / "out.json"
    done = python(BENCHMARKS / f"{name}.py", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["benchmark"] == name
    assert record["versions"].keys() >= {"python", "stretto", "torch", "numpy"}
    assert record["results"]
    assert all(line["low"] <= line["median"] <= line["high"] for line in record["results"])
    assert sorted(results.glob("*")) == before
