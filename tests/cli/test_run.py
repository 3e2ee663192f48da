"""Where `stretto run` may write."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.cli.terminal import check_writable


def test_a_file_that_is_new_or_there_already_may_be_written(tmp_path: Path) -> None:
    check_writable(None)
    check_writable(Path("-"))
    check_writable(tmp_path / "new.json")
    (tmp_path / "old.json").touch()
    check_writable(tmp_path / "old.json")


def test_a_folder_that_is_missing_and_one_that_is_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        check_writable(tmp_path / "missing" / "new.json")
    with pytest.raises(ValueError, match="is a folder: expected the name of a file"):
        check_writable(tmp_path)


@pytest.mark.parametrize("option", ["--json", "--html", "--trace"])
def test_a_place_that_cannot_be_written_is_refused_before_the_script_runs(option: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    found = CliRunner().invoke(app, ["run", option, str(tmp_path), "--", "touch", str(ran)])
    assert found.exit_code == 2
    assert "is a folder" in found.output
    assert not ran.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--echo", "0.5"], "expected a number >= 1"),
        (["--echo", "twice"], 'or "auto"'),
        (["--workers", "-1"], "workers=-1: expected an integer >= 0"),
        (["--prefetch", "0"], "prefetch=0: expected an integer >= 1"),
    ],
)
def test_options_that_cannot_work_are_named(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["run", *arguments, "--", "python", "train.py"])
    assert found.exit_code == 2
    assert message in found.output
