"""The study of the guide and that of the examples run."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.main import app

ROOT = Path(__file__).parents[2]


def run_study(file: Path, tmp_path: Path, factor: int) -> str:
    storage = ("--storage", str(tmp_path / "s.db"))
    size = ("--variants", "none,before", "--factors", str(factor), "--trials", "1", "--seeds", "1")
    done = CliRunner().invoke(app, ["study", str(file), *storage, *size])
    assert done.exit_code == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])


def test_the_study_of_the_guide_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/study.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_study.py").write_text(code)
    said = run_study(tmp_path / "my_study.py", tmp_path, factor=4)
    assert "test accuracy 85 %" in said
    assert "crashed, the last" not in said


def test_the_study_of_the_examples_reaches_its_target(tmp_path: Path) -> None:
    said = run_study(ROOT / "examples/study.py", tmp_path, factor=2)
    assert "test accuracy 92 %" in said
    assert "never reached" not in said
