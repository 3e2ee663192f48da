"""What pairs of runs prove, from given records, and the command on a script that trains."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.cli.prove import _Series, _show, _to_plain
from stretto.launch.options import RunOptions
from stretto.profile.prove import (
    Estimate,
    Pair,
    check_run,
    estimate,
    first_to_try,
    last_metric,
    metric_pattern,
    prove,
    to_text,
    why_nothing_to_try,
)
from stretto.profile.schema import RunRecord
from tests.forked import python
from tests.profile.records import advice, loader, rank_record, starved, unrecognised

WORKERS = RunOptions(workers=4)
ECHO = RunOptions(echo=2.0)
TRAIN = Path(__file__).parents[1] / "launch" / "scripts" / "train.py"


def record(s_per_update: float = 0.066, seconds: float = 80.0, **changes: Any) -> RunRecord:
    found = starved()
    found["ranks"] = [rank_record(s_per_update=s_per_update, **changes)]
    found["seconds"] = seconds
    return found


def pairs(ratios: list[float], metrics: list[tuple[float, float]] | None = None, **changes: Any) -> list[Pair]:
    """Runs without take 0.25 s an update and 100 s in all, those with it are `ratio` times as fast."""
    found = []
    for number, ratio in enumerate(ratios):
        without, with_change = metrics[number] if metrics else (None, None)
        found.append(
            Pair(
                without=record(0.25, 100.0),
                with_change=record(0.25 / ratio, 200.0 / (1 + ratio), **changes),
                metric_without=without,
                metric_with=with_change,
            )
        )
    return found


def test_the_median_ratio_is_proven_when_its_interval_lies_above_one() -> None:
    found = prove(pairs([2.0, 1.6, 1.25, 4.0, 1.6]), WORKERS)
    assert found.speedup == Estimate(value=1.6, low=1.25, high=4.0)
    assert found.command_speedup.value == pytest.approx(1.3)
    assert found.verdict == "proven: 1.60x (1.25 .. 4.00)"
    assert found.quality is None
    assert found.notes == []


def test_an_interval_that_includes_one_proves_nothing() -> None:
    assert prove(pairs([2.0, 1.6, 0.8, 1.6, 1.6]), WORKERS).verdict == "no proven win: 1.60x (0.80 .. 2.00)"
    assert prove(pairs([1.0] * 5), WORKERS).verdict == "no proven win: 1.00x (1.00 .. 1.00)"


def test_an_interval_below_one_is_slower() -> None:
    assert prove(pairs([0.5, 0.8, 0.8, 0.5, 0.8]), WORKERS).verdict == "slower: 0.80x (0.50 .. 0.80)"


def test_the_interval_is_the_same_each_time_and_narrows_with_more_pairs() -> None:
    ratios = list(np.random.default_rng(0).normal(1.5, 0.1, 40))
    few, many = estimate(ratios[:8], np.median), estimate(ratios, np.median)
    assert estimate(ratios, np.median) == many
    assert many.high - many.low < few.high - few.low
    assert min(ratios) < many.low < many.value == np.median(ratios) < many.high < max(ratios)


def test_the_slowest_rank_decides() -> None:
    pair = pairs([2.0])[0]
    pair.with_change["ranks"].append(rank_record(1, 2, s_per_update=0.5))
    assert pair.ratio == 0.5


def test_few_pairs_are_said_to_be_few() -> None:
    for num_pairs, percent in ((2, 50), (3, 75), (4, 88)):
        found = prove(pairs([2.0] * num_pairs), WORKERS)
        assert found.verdict == f"not proven by {num_pairs} pairs: 2.00x (2.00 .. 2.00)"
        (note,) = found.notes
        assert f"{num_pairs} pairs hold the true median in {percent} % of cases at most" in note


def test_an_echo_without_a_metric_leaves_the_quality_unknown() -> None:
    assert prove(pairs([2.0] * 5), ECHO).notes == [
        "An echo repeats examples, so a quicker update is not yet a better model.",
        "Whether quality held is unknown: give --metric.",
    ]


def test_the_metric_is_compared_in_pairs() -> None:
    found = prove(pairs([2.0] * 5, [(0.5, 0.75), (0.25, 0.5), (0.5, 0.75), (0.25, 0.5), (0.5, 0.75)]), ECHO)
    assert found.quality is not None
    assert (found.quality.mean_without, found.quality.mean_with) == (0.4, 0.65)
    assert found.quality.difference == Estimate(value=0.25, low=0.25, high=0.25)
    assert found.notes == ["An echo repeats examples, so a quicker update is not yet a better model."]


def test_a_loader_that_was_not_echoed_is_named_once() -> None:
    loaders = [loader(why_not_echoed="its batches cannot be copied")] * 2
    notes = prove(pairs([1.0] * 5, loaders=loaders), ECHO).notes
    assert notes[2:] == ["A training loader was not echoed: its batches cannot be copied"]


def test_unequal_numbers_of_updates_are_refused_with_both() -> None:
    check_run(record(updates=1000), record(updates=1000))
    with pytest.raises(ValueError, match=r"different numbers of updates, 1,000 and 1,200: .* give --steps N"):
        check_run(record(updates=1200), record(updates=1000))
    two = record(updates=1000)
    two["ranks"].append(rank_record(1, 2, updates=1000))
    with pytest.raises(ValueError, match=r"updates, 1,000 and 1,000 \+ 1,000"):
        check_run(two, record(updates=1000))


def test_a_run_without_training_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no training was recognised in a run: No training was recognised\."):
        check_run(unrecognised(), None)


def test_the_last_match_of_the_metric_counts() -> None:
    assert last_metric(metric_pattern(r"^acc=(\S+)"), "acc=0.1\nacc=0.2e-3\nval acc=9\n") == 0.2e-3


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("acc=(", "is no regular expression"), ("acc", "has 0 groups, expected one"), ("(a)(b)", "has 2 groups")],
)
def test_a_metric_without_one_group_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        metric_pattern(pattern)


@pytest.mark.parametrize(
    ("output", "says"),
    [("loss 1", "matches nothing"), ("acc=", "found None"), ("acc=x", "found 'x'"), ("acc=nan", "found 'nan'")],
)
def test_a_metric_that_is_no_number_is_refused(output: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        last_metric(metric_pattern(r"acc=(\w+)?"), output)


def test_options_are_written_as_on_the_command_line() -> None:
    assert to_text(RunOptions(echo=2.5, workers=4, prefetch=3, steps=9)) == "--echo 2.5 --workers 4 --prefetch 3"
    assert to_text(RunOptions(echo="auto", workers=0)) == "--echo auto --workers 0"
    assert to_text(RunOptions()) == ""


def series(*arguments: str) -> _Series:
    context = typer.main.get_command(app).commands["prove"].make_context("prove", [*arguments, "train.py"])
    return _Series(context, ["train.py"], RunOptions(steps=50), None, 5)


def test_the_first_advice_that_can_be_tried_is() -> None:
    given = record()
    tries = [advice("echo", "Echo after the loader", command="--echo 2.5"), advice("workers", "4 workers")]
    given["advice"] = [advice("cache", "Cache the data"), *tries]
    assert first_to_try(given) == tries[0]
    chosen = series()
    assert chosen._choose(given)
    assert chosen.change == RunOptions(echo=2.5, steps=50)


def test_without_such_advice_the_reason_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = record()
    given["advice"] = [advice("cache", "Cache the data", why="It fits.")]
    assert first_to_try(given) is None
    assert why_nothing_to_try(given) == "The advice, 'Cache the data', needs a change of the script. It fits."
    given["advice"] = []
    assert why_nothing_to_try(given) == given["verdict"]
    chosen = series()
    assert not chosen._choose(given)
    _show(None, [], chosen)
    assert capsys.readouterr().out == f"nothing to try\n{given['verdict']}\n"
    written = _to_plain(None, [], chosen)
    assert (written["verdict"], written["notes"], written["pairs"]) == ("nothing to try", [given["verdict"]], [])


def test_one_pair_is_refused() -> None:
    found = CliRunner().invoke(app, ["prove", "--pairs", "1", "--", "python", "train.py"])
    assert found.exit_code == 2
    assert "--pairs" in found.output


def stretto(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python("-m", "stretto.cli", "prove", *arguments, OMP_NUM_THREADS="1")


def test_pairs_of_real_runs_alternate_in_order_and_make_equal_updates(tmp_path: Path) -> None:
    options = ("--pairs", 2, "--echo", 2, "--metric", "loss ([0-9.]+)", "--json", tmp_path / "proof.json")
    done = stretto(*options, "--", "python", TRAIN, 2)
    assert done.returncode == 0, done.stderr
    runs = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert [run.split(" updates")[0] for run in runs] == [
        "[1/4] without: 24",
        "[2/4] with --echo 2: 24",
        "[3/4] with --echo 2: 24",
        "[4/4] without: 24",
    ]
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert done.stdout.startswith(f"{proof['verdict']} the updates per second with --echo 2\n")
    assert "Note: An echo repeats examples" in done.stdout
    assert "loss" not in done.stdout + done.stderr
    assert [pair["updates"] for pair in proof["pairs"]] == [24, 24]
    assert proof["options"] == {"echo": 2.0, "steps": None, "workers": None, "prefetch": None}
    metrics = [(pair["metric_without"], pair["metric_with"]) for pair in proof["pairs"]]
    assert metrics[0][0] == metrics[1][0] == proof["quality"]["mean_without"]  # the script is seeded
    assert metrics[0][0] != metrics[0][1]


def test_a_script_that_fails_ends_it_with_its_exit_code_and_output() -> None:
    done = stretto("--workers", 2, "--json", "-", "--", "python", TRAIN, 1, "fail")
    assert done.returncode == 7
    assert "what went wrong" in done.stderr
    assert done.stderr.endswith("stretto prove: the script failed, so there is no proof.\n")
    assert done.stdout == ""


def test_a_script_that_makes_more_updates_each_time_ends_with_both_numbers(tmp_path: Path) -> None:
    done = stretto("--workers", 2, "--", "python", TRAIN, 1, tmp_path / "counter")
    assert done.returncode == 2
    assert "two runs made different numbers of updates, 12 and 24" in " ".join(done.stderr.split())
