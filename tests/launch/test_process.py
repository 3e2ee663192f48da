"""The script's exit code, output, input, arguments and signals are its own."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stretto.launch.options import RunOptions
from stretto.launch.parent import run_script, script_run
from tests.launch.running import SCRIPTS, STRETTO_RUN, environment, stretto_run
from tests.patience import PATIENCE_S

SEES = str(SCRIPTS / "sees.py")
SIGNALS = str(SCRIPTS / "signals.py")


@pytest.fixture
def own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PYTHONPATH of the user's, with a sitecustomize."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import builtins\nbuiltins.own_sitecustomize = __file__\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.parametrize("ending", ["0", "3", "raise", "at once"])
def test_a_script_sees_and_says_the_same(
    ending: str,
    own_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    given = tmp_path / "stdin.txt"
    given.write_text("what it reads\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, SEES, ending, "--steps", "3", "--", "an argument", ""]
    with given.open() as stdin:
        alone = subprocess.run(command, stdin=stdin, capture_output=True, check=False, timeout=PATIENCE_S)
    with given.open() as stdin:
        before = os.dup(0)
        os.dup2(stdin.fileno(), 0)
        try:
            record = run_script(command, RunOptions())
        finally:
            os.dup2(before, 0)
            os.close(before)
    seen = capfdbinary.readouterr()
    assert str(own_path / "sitecustomize.py").encode() in alone.stdout
    assert seen.out == alone.stdout
    assert seen.err == alone.stderr
    assert record["exit_code"] == alone.returncode == {"0": 0, "3": 3, "raise": 1, "at once": 4}[ending]
    assert list(tmp_path.glob("stretto-run-*")) == []


def test_a_module_is_run_as_a_module(
    own_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(SCRIPTS)
    command = [sys.executable, "-m", "sees", "3", "x"]
    alone = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=PATIENCE_S)
    record = run_script(command, RunOptions())
    assert capfdbinary.readouterr().out == alone.stdout
    assert record["exit_code"] == 3


def test_a_run_that_is_captured_holds_both_streams_in_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr, flush=True); print('end')"
    with script_run([sys.executable, "-c", code], RunOptions(), capture=True) as run:
        assert run.output == "out\nerr\nend\n"
    assert capfd.readouterr() == ("", "")


def start(mode: str, folder: Path) -> "subprocess.Popen[str]":
    """`stretto run` with a script that waits for a signal."""
    process = subprocess.Popen(
        [*STRETTO_RUN, "--json", str(folder / "record.json"), "--", sys.executable, SIGNALS, mode],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(TMPDIR=str(folder)),
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_signal_reaches_a_script_that_handles_it(tmp_path: Path) -> None:
    number = signal.SIGTERM
    process = start("handles", tmp_path)
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out == f"saved after {number.name}\n"
    assert process.returncode == 7
    assert (tmp_path / "record.json").exists()
    assert list(tmp_path.glob("stretto-run-*")) == []


def test_a_script_that_dies_of_a_signal_gives_that_status(tmp_path: Path) -> None:
    number = signal.SIGINT
    process = start("dies", tmp_path)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -number
    assert f'"exit_signal": "{number.name}"' in (tmp_path / "record.json").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends the script")
def test_a_script_ends_when_stretto_run_is_killed(tmp_path: Path) -> None:
    process = start("handles", tmp_path)
    process.kill()
    out, _ = process.communicate(timeout=PATIENCE_S)  # until the script has closed it
    assert out == "saved after SIGTERM\n"


def test_what_a_killed_script_did_is_recorded(tmp_path: Path) -> None:
    done = stretto_run(tmp_path, [sys.executable, str(SCRIPTS / "killed.py")], TMPDIR=str(tmp_path))
    assert done.code == -signal.SIGKILL
    assert done.record is not None
    assert done.record["exit_signal"] == "SIGKILL"
    assert done.rank["ended"] == "killed by SIGKILL"
    assert done.rank["updates"] >= 1
    assert "SIGKILL" in done.err
    assert list(tmp_path.glob("stretto-run-*")) == []
