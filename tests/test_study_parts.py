"""The benchmark of the study: its parts are whole, its page is what its runs say, its loader keeps its pace."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.study import Condition, make_loader
from tests.forked import python

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_no_condition_is_wanted_with_different_numbers_of_trials_or_seeds(benchmark: Any) -> None:
    wanted = [
        (part.name, condition, part.trials, part.seeds)
        for part in benchmark("study_parts").parts()
        for condition in part.conditions
    ]
    assert len({(name, condition) for name, condition, *_ in wanted}) == len(set(wanted))


def test_the_pages_are_what_the_runs_say(benchmark: Any) -> None:
    tables, parts = benchmark("study_tables"), benchmark("study_parts")
    results = tables.Results.load(parts.parts())
    for name, wanted in tables.PAGES.items():
        page = (ROOT / name).read_text()
        assert tables.fill(page, {one: tables.TABLES[one](results) for one in wanted}) == page
    assert (ROOT / tables.FIGURE).read_text() == tables.figure(results)


def test_every_file_of_runs_belongs_to_a_part(benchmark: Any) -> None:
    parts = benchmark("study_parts")
    known = {part.runs for part in parts.parts()}
    assert {path for path in parts.RESULTS.glob("*.jsonl") if path.name != "store_runs.jsonl"} <= known


def test_the_loader_under_load_is_never_ahead_of_its_pace(benchmark: Any) -> None:
    load = benchmark("study_load")
    made = make_loader(Condition("before", "auto", 16, 4), seed=0)
    fresh_after = []

    def train(settings: Any, make: Any, seed: int) -> Iterator[None]:
        for _ in make([torch_rows(4)] * 10, lambda batch, generator: batch):
            fresh_after.append(made.stats().fresh_batches)
            yield None

    updates = load.train_under_load(train, None, made, 0)
    try:
        for _ in range(400):
            next(updates)
    finally:
        made.close()
    # 20 batches in 40 updates, then 20 in 120, and so on. It may be late, as a thread brings them, but never early.
    due = [2 * batch if batch < 20 else 40 + 6 * (batch - 20) for batch in range(40)]
    admitted = [sum(update >= at for at in due) for update in range(160)]
    assert all(found <= expected for found, expected in zip(fresh_after, admitted, strict=False))
    assert fresh_after[-1] > 1


def torch_rows(count: int) -> Any:
    import torch  # noqa: PLC0415

    return torch.zeros(count, 2)


def test_a_quick_study_ends_with_its_table_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = python(ROOT / "benchmarks/study.py", "--quick", "--workloads", "resnet_fashion")
    assert done.returncode == 0, done.stderr
    assert "[4 of 4 runs, 0 s left]" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("| ResNet, Fashion-MNIST | examples, before augmentation | 0.")
    assert list(tmp_path.glob("stretto-study-*")) == []
