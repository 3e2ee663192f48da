"""Two records side by side: what is compared, what is said of it, and the exit codes."""

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stretto.profile.compare import Row, compare, read_record
from stretto.profile.schema import EchoRecord, RunRecord
from tests.forked import python
from tests.profile.records import killed, loader, percentiles, rank_record, starved, unrecognised


def record(s_per_update: float = 0.066, **changes: Any) -> RunRecord:
    found = starved()
    found["ranks"] = [rank_record(s_per_update=s_per_update, **changes)]
    return found


def rows(a: RunRecord, b: RunRecord) -> dict[str, Row]:
    return {row.name: row for row in compare(a, b).rows}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def stretto(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python("-m", "stretto.cli", "compare", *arguments, COLUMNS="300")


def test_a_record_equals_itself() -> None:
    found = compare(starved(), starved())
    assert found.slowdown_percent == 0
    assert found.caveats == []
    assert all(row.change == 0 for row in found.rows)
    assert not [row for row in found.rows if row.name.startswith("stage")]
    assert found.verdict == "B is as fast as A: the time per update differs by less than 1 %."


def test_half_the_time_per_update_is_faster_and_twice_is_slower() -> None:
    assert compare(record(0.2), record(0.1)).slowdown_percent == -50
    assert compare(record(0.2), record(0.1)).verdict == "B is faster: 2.00 times the updates of A in the same time."
    assert compare(record(0.1), record(0.2)).slowdown_percent == 100
    assert compare(record(0.1), record(0.2)).verdict == "B is slower: an update takes 2.00 times as long as in A."


def test_better_and_worse_follow_the_direction_of_each_value() -> None:
    a = record(au_percent=40.0, stall_percent=60.0, updates_per_s=10.0)
    b = record(au_percent=70.0, stall_percent=65.0, updates_per_s=10.05, wait_ms=percentiles(24.0))
    found = rows(a, b)
    assert (found["AU"].change, found["AU"].is_better) == (30, True)
    assert (found["stall"].change, found["stall"].is_better) == (5, False)
    assert found["updates"].change == pytest.approx(0.5)
    assert found["updates"].is_better is None
    assert (found["wait, P99"].a, found["wait, P99"].b, found["wait, P99"].is_better) == (144, 72, True)
    assert found["wait, P50"].change == pytest.approx(-50)


def test_the_slowest_rank_counts_and_one_that_never_trained_does_not() -> None:
    a, b = record(0.1), record(0.1)
    b["ranks"] += [rank_record(1, 3, s_per_update=0.3), rank_record(2, 3, s_per_update=math.nan)]
    assert compare(a, b).slowdown_percent == pytest.approx(200)
    assert "The numbers of ranks differ: 1 in A, 3 in B." in compare(a, b).caveats


def test_stages_that_changed_or_are_in_one_record_only_have_a_row() -> None:
    stages = [dict(stage) for stage in loader()["stages"]]
    stages[0]["wall_ms"] *= 2
    stages[1]["wall_ms"] *= 1.04
    stages[2]["name"] = "Resize"
    found = rows(record(), record(loaders=[loader(stages=stages)]))
    assert [name for name in found if name.startswith("stage")] == [
        "stage read",
        "stage RandomResizedCrop",
        "stage Resize",
    ]
    assert (found["stage read"].change, found["stage read"].is_better) == (100, False)
    assert found["stage Resize"].a is None
    assert found["stage Resize"].change is None


def test_ratio_and_factor_are_those_of_the_loader_that_trains_the_most() -> None:
    echo = EchoRecord(
        unit="example",
        factor="auto",
        realised=2.5,
        uses=64000,
        fresh_items=25600,
        fresh_batches=400,
        dropped_uses=0,
        buffer_bytes=1 << 20,
        began_at_update=2,
    )
    others = [loader(batches=9000, is_training=False), loader(batches=3, ratio=9.0)]
    found = rows(record(), record(loaders=[*others, loader(ratio=2.0, echo=echo)]))
    assert (found["R"].a, found["R"].b, found["R"].is_better) == (3.67, 2.0, None)
    assert (found["echoing factor"].a, found["echoing factor"].b) == (1.0, 2.5)


def test_what_else_differs_is_said() -> None:
    b = starved()
    b.update(command=["python", "other.py"], host="trainer-9", cores=2.5, torch="2.6.0")
    b["options"] = {**b["options"], "echo": "auto", "workers": 4}
    b["ranks"] = [rank_record(device="cuda:0")]
    assert compare(starved(), b).caveats == [
        "The commands differ: python train.py --data photos in A, python other.py in B.",
        "The hosts differ: trainer-1 in A, trainer-9 in B.",
        "The usable cores differ: 8 in A, 2.5 in B.",
        "The devices differ: cpu in A, cuda:0 in B.",
        "The versions of torch differ: 2.13.0 in A, 2.6.0 in B.",
        "The options of stretto run differ: none in A, echo auto, workers 4 in B.",
        "With an echo some examples are repeats: an update is not worth what a fresh one is.",
    ]


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in starved().items() if name != key}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1], "is no record of a run"),
        ({"a": 1}, "is no record of a run"),
        ({**starved(), "version": 99}, "is a record of version 99, expected 1"),
        (without("ranks"), "ranks is missing"),
        ({**starved(), "ranks": 5}, "ranks is 5"),
        ({**starved(), "ranks": [{**rank_record(), "s_per_update": "fast"}]}, r"ranks\[0\].s_per_update is 'fast'"),
        ({**starved(), "ranks": [{**rank_record(), "wait_ms": {}}]}, r"ranks\[0\].wait_ms.mean is missing"),
        (unrecognised(), "holds no training that was recognised: No training was recognised."),
        ({**killed(), "ranks": [{**killed()["ranks"][0], "s_per_update": 0.0}]}, "holds no training"),
    ],
)
def test_what_is_no_record_of_training_is_refused_by_name(tmp_path: Path, content: object, says: str) -> None:
    path = write(tmp_path / "a.json", content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{says}"):
        read_record(path)


def test_files_that_are_no_json_or_absent_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: cannot be read: No such file"):
        read_record(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: is no JSON"):
        read_record(path)


def test_a_written_record_is_read_as_it_was(tmp_path: Path) -> None:
    for made in (starved(), record(ratio_first=None)):
        assert read_record(write(tmp_path / "a.json", made)) == made


def test_the_exit_code_says_whether_the_regression_is_allowed(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", record(0.1)), write(tmp_path / "b.json", record(0.11))
    allowed = stretto(a, b, "--max-regression-pct", 11, "--json", tmp_path / "out.json")
    assert allowed.returncode == 0, allowed.stderr
    lines = allowed.stdout.splitlines()
    assert lines[0] == "B is slower: an update takes 1.10 times as long as in A."
    row = next(line for line in lines if line.startswith("time per update"))
    assert row.split() == ["time", "per", "update", "100", "ms", "110", "ms", "+10.0", "%", "worse"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["is_regression"] is False
    assert written["slowdown_percent"] == pytest.approx(10)
    assert written["rows"][0]["is_better"] is False

    refused = stretto(a, b, "--max-regression-pct", 9)
    assert refused.returncode == 1
    assert "Regression: 10.0 % more time per update, at most 9 % are allowed." in refused.stdout
    assert stretto(a, b).returncode == 0


def test_a_record_that_cannot_be_used_ends_with_exit_code_2(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", starved()), write(tmp_path / "b.json", unrecognised())
    done = stretto(a, b, "--json", "-")
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"stretto compare: {b}: holds no training" in done.stderr
