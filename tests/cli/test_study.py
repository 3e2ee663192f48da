"""`stretto study`: what it prints, what it writes, what it refuses, and that a study goes on."""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from stretto.cli.main import app
from tests.forked import python

FILE = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.study import Study

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
train_data = TensorDataset(images[:1200], labels[:1200])


def augment(batch, generator):
    x, y = batch
    return x + 0.1 * torch.randn(x.shape, generator=generator), y


def train(settings, make_loader, seed):
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, momentum=0.9, nesterov=True)

    def accuracy():
        with torch.no_grad():
            return 100 * (model(images[1200:]).argmax(1) == labels[1200:]).float().mean().item()

    fresh = DataLoader(train_data, settings.batch_size, shuffle=True, drop_last=True)
    for update, (x, y) in enumerate(make_loader(fresh, augment)):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(update)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield accuracy if (update + 1) % 2 == 0 else None


study = Study(train, metric="test accuracy, %", target=80, batch_size=32, max_fresh_examples=1200, lr=(0.02, 1.0),
              buffer_batches=4)
"""
SMALL = "--variants none,before --factors 4 --trials 2 --seeds 2"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)  # puts sys.path back afterwards
    before = set(sys.modules)
    path = tmp_path / "digits_study.py"
    path.write_text(FILE)
    yield path
    for name in set(sys.modules) - before:
        if "digits_study" in name:
            del sys.modules[name]


def stretto_study(file: Path, options: str = SMALL) -> Result:
    return CliRunner().invoke(app, ["study", str(file), *shlex.split(options)])


def words(text: str) -> str:
    return " ".join(text.split())


def counts(plain: dict) -> list:
    """What a study that is made again must say again."""
    return [
        (row["params"], row["trials"], row["fresh_examples"], row["updates"], row["final"], row["best_value"])
        for row in plain["conditions"]
    ]


def test_the_verdict_comes_first_and_the_next_step_last(file: Path, tmp_path: Path) -> None:
    written = {name: tmp_path / f"report.{name}" for name in ("json", "markdown", "svg")}
    options = " ".join(f"--{name} {path}" for name, path in written.items())
    done = stretto_study(file, f"{SMALL} {options}")
    assert done.exit_code == 0, done.stderr
    plain = json.loads(written["json"].read_text())
    assert words(done.stdout).startswith(plain["verdict"])
    assert "fresh examples" in plain["verdict"]
    assert words(done.stdout).endswith(plain["next_step"])
    assert "trials diverged" in words(done.stdout)
    assert re.match(r"\[1 of 8 runs, \S+ \S+ left\] no echo, batch 32: trial 0: ", words(done.stderr))
    assert "[8 of 8 runs, 0 s left] " in words(done.stderr)
    assert "left] examples, before augmentation, e = 4, buffer 4, batch 32: trial 0" in words(done.stderr)
    assert written["markdown"].read_text().startswith("| condition | fresh examples |")
    assert ElementTree.fromstring(written["svg"].read_text()).get("viewBox")
    assert (tmp_path / "digits_study.study.db").is_file()
    again = stretto_study(file, f"{SMALL} --json -")
    assert json.loads(again.stdout) == plain
    assert again.stderr == ""


def test_a_killed_study_resumes_in_two_processes_and_gives_the_same_table(file: Path, tmp_path: Path) -> None:
    whole = json.loads(stretto_study(file, f"{SMALL} --json -").stdout)
    kill = """
import os, signal, sys
from stretto.cli.main import app
from stretto.study import Watcher
from stretto.study.search import Search
execute, made = Search._execute, []
def dies(self, task, watcher):
    if len(made) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    made.append(task)
    return execute(self, task, watcher)
Search._execute = dies
app(sys.argv[1:])
"""
    options = f"{SMALL} --storage {tmp_path / 'other.db'} --json"
    assert python("-c", kill, "study", file, *shlex.split(f"{options} -")).returncode == -9
    done = python("-m", "stretto.cli", "study", file, *shlex.split(f"{options} - --processes 2"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("[3 of 8 runs")
    assert counts(json.loads(done.stdout)) == counts(whole)


def test_repeats_may_end_at_the_target(file: Path) -> None:
    options = "--variants none --trials 1 --seeds 2 --json -"
    (short,) = json.loads(stretto_study(file, f"{options} --to-target").stdout)["conditions"]
    (full,) = json.loads(stretto_study(file, options).stdout)["conditions"]
    assert (short["num_final"], full["num_final"]) == (0, 2)
    assert short["fresh_examples"] == full["fresh_examples"]


def test_an_interrupted_study_says_how_to_go_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/stretto", "study", "digits_study.py"])
    code = FILE.replace("    torch.manual_seed(seed)\n", "    os.kill(os.getpid(), signal.SIGTERM)\n")
    file.write_text("import os\nimport signal\n" + code)
    handler = signal.getsignal(signal.SIGTERM)
    done = stretto_study(file)
    assert done.exit_code == 130
    assert "Interrupted: 0 of 8 runs are made and kept in" in words(done.stderr)
    assert words(done.stderr).endswith("The same command goes on: stretto study digits_study.py")
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_crash_is_told_and_does_not_end_the_study(file: Path) -> None:
    file.write_text(FILE.replace("    torch.manual_seed(seed)\n", "    assert seed != 0, 'no seed'\n"))
    done = stretto_study(file)
    assert done.exit_code == 1
    assert words(done.stdout).startswith("No run went to its end: 4 trials crashed, 0 diverged.")
    line = file.read_text().splitlines().index("    assert seed != 0, 'no seed'") + 1
    crash = f"no echo: 2 of 2 runs crashed, the last with AssertionError: no seed (digits_study.py, line {line})"
    assert crash in words(done.stdout)


def test_a_training_function_that_cannot_count_ends_the_study(file: Path) -> None:
    file.write_text(FILE.replace("yield accuracy if", "yield 'high' if"))
    says = "stretto study: train yielded 'high' (str) as test accuracy, %: expected None, a number"
    done = stretto_study(file)
    assert done.exit_code == 2
    assert says in words(done.stderr)
    # Two processes, forked so that they need not import torch again.
    fork = """
import multiprocessing, sys
from stretto.cli.main import app
multiprocessing.get_context = lambda _, get_context=multiprocessing.get_context: get_context("fork")
app(sys.argv[1:])
"""
    done = python("-c", fork, "study", file, *shlex.split(f"{SMALL} --processes 2"))
    assert done.returncode == 2
    assert says in words(done.stderr)


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"study = Study": "other = Study"}, "", "digits_study.py defines no study: expected a line such as"),
        ({"target=80": "target=float('nan')"}, "", "digits_study.py fails: ValueError: target=nan"),
        ({}, "--factors 2,many", '--factors 2,many: expected numbers > 1 or "auto"'),
        ({}, "--factors 1", 'factor=1 with variant "batch": that is no echo'),
        ({}, "--variants none,behind", "variant 'behind': expected one of none, batch, after, before, workers"),
        ({}, "--buffers 8,big", "--buffers 8,big: expected integers >= 1"),
        ({}, "--batch-sizes 0", "batch_size=0: expected an integer >= 1"),
        ({}, "--batch-sizes 2000", "batch_size=2000: expected at most the study's budget, max_fresh_examples=1200"),
        ({}, "--storage absent/s.db", "absent/s.db: there is no folder"),
        ({}, "--json absent/s.json", "absent/s.json: there is no folder"),
        ({}, "--storage digits_study.py", "digits_study.py is no SQLite file"),
        ({}, "--runs digits_study.py", "digits_study.py, line 2: b'import torch' is no run"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_run(
    file: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], options: str, says: str
) -> None:
    text = FILE
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    monkeypatch.chdir(file.parent)
    done = stretto_study(Path(file.name), options)
    assert done.exit_code == 2
    assert f"stretto study: {says}" in words(done.stderr)
    assert done.stdout == ""
    assert file.read_text() == text
    assert [path for path in os.listdir() if path.endswith(".db")] == []


def test_a_storage_of_another_study_is_refused_with_both_values(file: Path) -> None:
    stretto_study(file, "--variants none --trials 1 --seeds 1")
    storage = file.with_suffix(".study.db")
    before = storage.read_bytes()
    file.write_text(FILE.replace("target=80", "target=75"))
    done = stretto_study(file, "--variants none --trials 1 --seeds 1")
    assert done.exit_code == 2
    assert "belongs to another study: target is 80.0 there and 75.0 here. Nothing was changed" in words(done.stderr)
    assert storage.read_bytes() == before


def test_without_optuna_it_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.study.storage.find_spec", lambda name: None)
    done = stretto_study(file)
    assert done.exit_code == 2
    assert "a study needs optuna, which is missing: pip install 'stretto[study]'" in words(done.stderr)
