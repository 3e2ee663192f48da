"""The benchmark of the study at a slow store: what it runs, keeps and computes. There is no store here."""

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.demo.calibrate import Speeds
from stretto.study import Condition, Run, Study, run
from stretto.study.points import point
from stretto.study.records import Record, Task
from tests.study.toys import BASELINE as TOY_BASELINE
from tests.study.toys import PARAMS as TOY_PARAMS
from tests.study.toys import loader_of, make_study

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SPEEDS = Speeds(0.02, 0.12, 1e5)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("study_store_runs")


@pytest.fixture
def report(runs: Any) -> Any:
    """The module of the tables."""
    return importlib.import_module("study_store_report")


@pytest.fixture
def study(runs: Any) -> Study:
    found: Study = runs.workload.study
    return found


def a_run(condition: Condition, seed: int = 100, **values: Any) -> Run:
    values = {"fresh_examples": 26_000, "updates": 400, "seconds": 60.0, "status": "reached", **values}
    params = values.pop("params", {"lr": 0.05, "decay": 0.5})
    return Run(condition=condition, params=params, seed=seed, best=82.0, **values)


def a_record(
    study: Study, condition: Condition, trial: int, seed: int, fresh_examples: int, **values: Any
) -> Record:
    is_repeat = seed >= 100
    made = a_run(condition, seed, fresh_examples=fresh_examples, params=point(study, trial), **values)
    return Record(Task(condition, trial, seed, is_repeat), made)


class FakeStore:
    """Says what it was asked for; can be told to fail."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails_at: int | None = None
        self.status = "reached"

    @contextlib.contextmanager
    def open(self) -> Iterator["FakeStore"]:
        self.asked.append("open")
        yield self

    def calibrate(self, study: Study, say: Callable[[str], None]) -> Speeds:
        self.asked.append("calibrate")
        return replace(SPEEDS, t_up_s=0.12 + 0.001 * len(self.asked))

    def run(self, study: Study, wanted: Any, speeds: Speeds) -> Run:
        if self.fails_at == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append(f"{wanted.condition.key}, seed {wanted.seed}")
        return a_run(wanted.condition, wanted.seed, status=self.status, params=dict(wanted.params))


def test_what_is_in_the_file_is_not_run_again_and_its_seed_keeps_its_rate(
    runs: Any, study: Study, tmp_path: Path
) -> None:
    path = tmp_path / "study/runs.jsonl"
    wanted = [
        runs.Wanted(condition, (("decay", 0.5), ("lr", 0.1)), seed)
        for seed in (100, 101)
        for condition in (runs.BASELINE, runs.TIMED)
    ]
    keys = [f"{one.condition.key}, seed {one.seed}" for one in wanted]
    store = FakeStore()
    store.fails_at = 5
    with pytest.raises(KeyboardInterrupt):
        runs.make_runs(study, wanted, path, store.open, str)
    assert store.asked == ["open", "calibrate", *keys[:2], "calibrate"]

    store = FakeStore()
    store.fails_at = 3
    with path.open("a") as file:
        file.write('{"study": {"tra')  # a line that was cut off
    with pytest.raises(KeyboardInterrupt):
        runs.make_runs(study, wanted, path, store.open, str)
    assert store.asked == ["open", "calibrate", keys[2]]
    store = FakeStore()
    made = runs.make_runs(study, wanted, path, store.open, str)
    assert store.asked == ["open", keys[3]]
    assert [runs.Wanted.of(timed.run) for timed in made] == wanted
    assert made[0].speeds == made[1].speeds
    assert made[2].speeds == made[3].speeds
    assert made == runs.read_runs(path, study.fingerprint)

    store = FakeStore()
    assert runs.make_runs(study, wanted, path, store.open, str) == made
    assert store.asked == []


def test_another_setting_or_seed_is_another_run(runs: Any, study: Study, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    one = runs.Wanted(runs.BASELINE, (("lr", 0.1),), 100)
    runs.make_runs(study, [one], path, FakeStore().open, str)
    for other in (replace(one, seed=101), replace(one, params=(("lr", 0.2),)), replace(one, condition=runs.TIMED)):
        store = FakeStore()
        runs.make_runs(study, [other], path, store.open, str)
        assert len(store.asked) == 3
    assert len(path.read_text().splitlines()) == 4


def test_runs_of_another_study_are_refused(runs: Any, study: Study, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    one = runs.Wanted(runs.BASELINE, (("lr", 0.1),), 100)
    runs.make_runs(study, [one], path, FakeStore().open, str)
    with pytest.raises(ValueError, match=r"target is 82\.0 there and 83\.0 here"):
        runs.make_runs(replace(study, target=83.0), [one], path, FakeStore().open, str)


def test_a_crash_is_raised_and_not_kept(runs: Any, study: Study, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    store = FakeStore()
    store.status = "crashed"
    with pytest.raises(RuntimeError, match="no echo, seed 100 crashed"):
        runs.make_runs(study, [runs.Wanted(runs.BASELINE, (("lr", 0.1),), 100)], path, store.open, str)
    assert not path.exists()


def test_training_from_the_store_takes_its_batches_and_pauses_the_link_only_for_evaluations(runs: Any) -> None:
    seen: list[Any] = []

    class Link:
        paused = False

        def pause(self) -> None:
            self.paused = True

        def resume(self) -> None:
            self.paused = False

    def train(settings: Any, make_loader: Any, seed: int) -> Iterator[Any]:
        for update, (numbers,) in enumerate(make_loader(loader_of(num_examples=8), lambda batch, _: batch)):
            seen.append((link.paused, numbers.tolist()))
            yield (lambda: seen.append((link.paused, "evaluated")) or 0.0) if update % 5 == 4 else None

    link = Link()
    toy = make_study(train, max_fresh_examples=40)
    from_store = runs.from_store(toy, loader_of(), link)
    assert run(from_store, TOY_BASELINE, TOY_PARAMS, 0).status == "missed"
    evaluations = [is_paused for is_paused, what in seen if what == "evaluated"]
    updates = [(is_paused, what) for is_paused, what in seen if what != "evaluated"]
    assert evaluations == [True] * 2
    assert not any(is_paused for is_paused, _ in updates)
    assert sorted(number for _, numbers in updates for number in numbers) == list(range(40))
    assert not link.paused


def test_settings_are_those_of_the_best_trial_of_the_nearest_condition(runs: Any, study: Study) -> None:
    e2, e4, e8, auto = (runs.echoed(factor) for factor in (2, 4, 8, "auto"))
    found = [
        a_record(study, runs.BASELINE, 0, 0, 30_000),
        a_record(study, runs.BASELINE, 1, 0, 20_000, status="missed"),
        a_record(study, runs.BASELINE, 2, 0, 25_000),
        a_record(study, e2, 3, 0, 15_000),
        a_record(study, e4, 4, 0, 8_000),
        a_record(study, e4, 5, 0, 9_000),
        a_record(study, e4, 5, 100, 1_000),
        a_record(study, e8, 6, 0, 5_000),
        a_record(study, auto, 7, 0, 100),
        a_record(study, replace(e4, buffer_batches=64), 8, 0, 100),
    ]
    nearest = {runs.BASELINE: 2, e2: 3, runs.echoed(3): 4, e4: 4, runs.echoed(5): 4, runs.echoed(6): 6, auto: 6}
    assert {c: runs.tuned(study, found, c) for c in nearest} == {c: point(study, n) for c, n in nearest.items()}
    assert runs.tuned(study, found, runs.echoed(4, "batch")) == point(study, 0)
    assert runs.tuned(study, [], e4) == point(study, 0)


def findings(runs: Any, report: Any, study: Study) -> Any:
    """At the store e = 2 needs 0.5 of the fresh examples, e = 3 0.4; in the study e = 2 needs 0.6, e = 8 0.2."""
    timed = []
    for seed, slower in ((100, 1.0), (101, 1.2)):
        for condition, fresh_examples, updates, seconds, wait_s in (
            (runs.BASELINE, 25_600, 400, 50.0, 42.0),
            (runs.echoed(2), 12_800, 400, 27.0, 18.0),
            (runs.echoed(3), 10_240, 480, 21.0, 9.0),
            (runs.echoed("auto"), 6_400, 500, 12.0, 0.0),
        ):
            made = a_run(
                condition,
                seed,
                fresh_examples=fresh_examples,
                updates=updates,
                seconds=slower * seconds if condition == runs.BASELINE else seconds,
                wait_s=wait_s,
            )
            timed.append(runs.TimedRun(SPEEDS, made))
    missed = a_run(runs.echoed(4, "batch"), status="missed")
    found = [
        a_record(study, condition, trial, seed, fresh_examples)
        for condition, fresh_examples in (
            (runs.BASELINE, 20_000),
            (runs.echoed(2), 12_000),
            (runs.echoed(8), 4_000),
        )
        for trial, seed in ((0, 0), (0, 100), (0, 101))
    ]
    found += [a_record(study, runs.echoed(8), 1, 0, 9_000), a_record(study, runs.echoed(8), 1, 102, 9_000)]
    return report.Findings.of(study, [*timed, runs.TimedRun(SPEEDS, missed)], found)


def test_computed_speed_ups_follow_from_the_studys_fresh_examples_and_the_stores_where_it_has_none(
    runs: Any, report: Any, study: Study
) -> None:
    made = findings(runs, report, study)
    assert {e: made.computed_ratio(e).median for e in (2, 3, 8)} == {2: 0.6, 3: 0.4, 8: 0.2}
    assert made.computed_ratio(4) is None
    spread = report.Spread(0.5, 0.4, 0.625)
    assert report.computed(spread, 4, 6) == report.Spread(2.0, 1.6, 2.5)
    assert report.computed(spread, 4, 2) == report.Spread(1.0, 0.8, 1.25)
    lines = report.ratio_table(made).splitlines()
    assert lines[2:8] == [
        "| N(e) / N(1) | 0.600 | 0.400* |  |  |  | 0.200 |  |",
        "| 1, computed | 0.83 | 0.83 |  |  |  | 0.62 |  |",
        "| 2, computed | **1.67** | **1.67** |  |  |  | 1.25 |  |",
        "| 4, computed | 1.67 | **2.50** |  |  |  | **2.50** |  |",
        "| 6, computed | 1.67 | 2.50 |  |  |  | **3.75** |  |",
        "| 6.00, measured | 2.04 | **2.62** |  |  |  |  |  |",
    ]
    assert lines[8].startswith("| near 6, measured in the paper with ResNet-50 | 1.80 | 2.43 | 3.06 | **3.25** |")
    assert lines[9] == "| 10, computed | 1.67 | 2.50 |  |  |  | **5.00** |  |"
    assert lines[-1] == "*) of the runs at the store; the others of the study."


def test_measured_rows_have_speed_ups_over_seeds_and_what_the_formula_says(
    runs: Any, report: Any, study: Study
) -> None:
    rows = report.measured_table(findings(runs, report, study)).splitlines()[2:]
    echo = "| examples, before augmentation"
    assert rows == [
        "| no echo | 25,600 | 400 | 32.5 | 55.0 | 77 | 1 | 1 | 1 |  |",
        f"{echo}, e = 2 | 12,800 | 400 | 22.5 | 27.0 | 67 | 0.500 | **2.04** (1.85 .. 2.22) | 2.00 | 0.526, 1.80 |",
        f"{echo}, e = 3 | 10,240 | 480 | 25.0 | 21.0 | 43 | 0.400 | **2.62** (2.38 .. 2.86) | 2.50 | 0.367, 2.43 |",
        # used 5 times, below R
        f"{echo}, auto | 6,400 | 500 | 24.0 | 12.0 | 0 | 0.250 | **4.58** (4.17 .. 5.00) | 4.00 |  |",
        "| batch echoing, e = 4 | 26,000 | 400 | 150.0 | 60.0 | 0 | target missed |  |  |  |",
    ]


def test_a_line_of_the_file_names_study_speeds_and_run(runs: Any, study: Study, tmp_path: Path) -> None:
    timed = runs.TimedRun(SPEEDS, a_run(runs.echoed("auto")))
    runs.append_run(tmp_path / "runs.jsonl", study.fingerprint, timed)
    line = json.loads((tmp_path / "runs.jsonl").read_text())
    assert line["speeds"] == {"t_down_s": 0.02, "t_up_s": 0.12, "rate_bytes_per_s": 1e5}
    assert line["run"]["condition"]["factor"] == "auto"
    assert runs.read_runs(tmp_path / "runs.jsonl", study.fingerprint) == [timed]


def test_the_whole_benchmark_continues_from_its_runs_and_writes_figures_and_tables(
    runs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = importlib.import_module("study_store")
    monkeypatch.setattr(main, "STUDY_RUNS", tmp_path / "none.jsonl")
    monkeypatch.setattr(main.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("sys.argv", ["study_store.py", "--rounds", "2", "--out", str(tmp_path / "out.json")])
    records = []
    for num_asked in (3 + 2 * len(runs.CONDITIONS), 0):  # to open, two calibrations, and all runs; then nothing
        store = FakeStore()
        monkeypatch.setattr(main, "open_slow_store", store.open)
        main.main()
        assert len(store.asked) == num_asked
        records.append(json.loads((tmp_path / "out.json").read_text()))
    for record in records:
        figures = {line["what"]: line["median"] for line in record["results"]}
        assert figures["R, as the link was set"] == pytest.approx(6.1, abs=0.5)
        assert figures["examples, before augmentation, e = 6, speed-up"] == 1
        assert figures["e = 6, computed speed-up at R = 2"] == pytest.approx(1 / 3)
        assert record["table"].count("| examples, before augmentation") == 6
    assert records[0]["results"] == records[1]["results"]
    assert len((tmp_path / "out_runs.jsonl").read_text().splitlines()) == 2 * len(runs.CONDITIONS)
