"""Commands that do not exist, crash, or never train: the message says what happened, and a record is made."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stretto.launch.options import RunOptions, parse_factor
from stretto.launch.parent import run_script, script_run
from stretto.profile.build import Ending, build_record
from stretto.profile.schema import RunRecord
from tests.launch.running import SCRIPTS

MODES = ["crash", "no_loader", "no_optimizer", "foreign", "anew"]


def run_bad(mode: str) -> RunRecord:
    with script_run([sys.executable, str(SCRIPTS / "bad.py"), mode], RunOptions(), capture=True) as run:
        return run.record


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MODES, pool.map(run_bad, MODES), strict=True))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["python", "nowhere.py"], "nowhere.py: there is no such script in"),
        (["nowhere.py"], "nowhere.py: there is no such script in"),
        (["python", "-u", "nowhere.py", "x.py"], "nowhere.py: there is no such script in"),
        (["python", "-W", "ignore", "-X", "dev", "nowhere.py"], "nowhere.py: there is no such script in"),
        (["no-such-program", "train.py"], "no-such-program: there is no such program on PATH"),
        ([], "there is no command: expected something like"),
    ],
)
def test_what_does_not_exist_is_named(command: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_script(command, RunOptions())


@pytest.mark.parametrize("text", ["0.5", "twice", "nan"])
def test_a_factor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_factor(text)


def test_options_that_cannot_work_together_are_refused() -> None:
    with pytest.raises(ValueError, match="prefetch=2 with workers=0"):
        RunOptions(workers=0, prefetch=2)
    with pytest.raises(ValueError, match="steps=1: expected an integer >= 2"):  # one step recognises no loader
        RunOptions(steps=1)


def test_a_disk_that_was_full_is_said_to_be_why_nothing_was_seen(tmp_path: Path) -> None:
    ending = Ending(command=["python", "x.py"], options={}, problem="the disk of /tmp is full")
    ending.set_status(0)
    record = build_record(tmp_path, ending)
    assert record["evidence"] == record["findings"] == ["the disk of /tmp is full"]


def test_a_program_without_torch(capfd: pytest.CaptureFixture[str]) -> None:
    record = run_script([sys.executable, "-c", "print('done')"], RunOptions())
    assert capfd.readouterr() == ("done\n", "")
    assert record["ranks"] == []
    assert record["verdict"].startswith(
        "No training loader was recognised; the script ended with exit code 0 after"
    )
    assert record["evidence"] == ["no Python process that was started imported torch"]


def test_a_crash_before_the_first_batch(records: dict[str, RunRecord]) -> None:
    record = records["crash"]
    assert record["exit_code"] == 1
    assert "ended with exit code 1" in record["verdict"]
    assert record["evidence"] == [
        "it raised RuntimeError: no data to be found",
        "no torch DataLoader was iterated",
        "no torch optimizer stepped",
    ]


def test_an_optimizer_without_a_loader(records: dict[str, RunRecord]) -> None:
    evidence = records["no_loader"]["evidence"]
    assert evidence == ["no torch DataLoader was iterated", "optimizers that stepped: SGD"]


def test_a_loader_without_an_optimizer(records: dict[str, RunRecord]) -> None:
    evidence = records["no_optimizer"]["evidence"]
    assert evidence == ["DataLoader over Tensor: 3 batches in 1 iterations", "no torch optimizer stepped"]


def test_an_optimizer_that_is_not_torchs_is_named(records: dict[str, RunRecord]) -> None:
    assert records["foreign"]["evidence"][-1] == (
        "optimizers that are not torch's, whose steps cannot be seen: __main__.Lion"
    )
    assert "stretto.profile(loader, step)" in records["foreign"]["next_step"]


def test_an_iterator_for_each_batch_is_no_training_loader_and_said_to_be_slow(
    records: dict[str, RunRecord],
) -> None:
    record = records["anew"]
    assert record["ranks"] == []
    assert record["evidence"] == [
        "DataLoader over Tensor: 5 batches in 5 iterations: next(iter(loader)) starts the loader, and its workers, "
        "anew for each batch; keep the iterator",
        "optimizers that stepped: SGD",
    ]
