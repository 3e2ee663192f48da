"""The settings of a study, and the file that it comes from."""

import sys
from pathlib import Path

import pytest

from stretto.study import Study, load_study
from tests.study.toys import learn, make_study

FILE = """
from stretto.study import Study

def train(settings, make_loader, seed):
    yield 1.0

study = Study(train, metric="loss", target=1, higher_is_better=False, max_fresh_examples=1000, lr=(0.1, 0.1))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)  # puts sys.path back afterwards
    return tmp_path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train": 3}, "train=3: expected the training function"),
        ({"metric": ""}, "metric='': expected its name"),
        ({"target": float("nan")}, "target=nan: expected a finite number"),
        ({"target": "85"}, "target='85' is a str: expected a number"),
        ({"higher_is_better": 1}, "higher_is_better=1 is of type int"),
        ({"batch_size": 0}, "batch_size=0: expected an integer >= 1"),
        ({"max_fresh_examples": 1e5}, "max_fresh_examples=100000.0 is a float: expected an integer"),
        ({"max_fresh_examples": 3}, "max_fresh_examples=3: expected at least one batch, batch_size=4"),
        ({"evaluate_budget": 201}, "evaluate_budget=201: expected at most max_fresh_examples=200"),
        ({"lr": 0.1}, r"lr=0.1: expected a range, \(low, high\)"),
        ({"lr": (0.3, 0.1)}, r"lr=\(0.3, 0.1\): expected 0 < low <= high"),
        ({"lr": (0, 0.1)}, r"lr=\(0, 0.1\): expected 0 < low <= high"),
        ({"decay": (0.5, 1.5)}, r"decay=\(0.5, 1.5\): expected shares"),
        ({"search": {"lr": (1, 2)}}, "search has 'lr', which is searched anyway"),
        ({"search": {"momentum": (1, "2")}}, "momentum='2' is a str"),
    ],
)
def test_what_cannot_work_is_refused_with_its_value(options: dict, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make_study(**options)


def test_a_lower_value_is_better_where_that_is_said() -> None:
    up, down = make_study(), make_study(higher_is_better=False)
    assert up.is_reached(1.0)
    assert not up.is_reached(0.9)
    assert down.is_reached(0.9)
    assert not down.is_reached(1.1)
    assert up.is_better(2, 1)
    assert not down.is_better(2, 1)
    assert down.is_better(2, None)


def test_the_goal_reads_with_and_without_a_unit() -> None:
    assert make_study(metric="test accuracy, %", target=85).goal == "test accuracy 85 %"
    assert make_study(metric="loss", target=0.25).goal == "loss 0.25"


def test_a_fingerprint_is_of_all_that_runs_must_share() -> None:
    assert make_study().fingerprint == make_study(target=1).fingerprint
    changes = [{"target": 2}, {"metric": "loss"}, {"batch_size": 8}, {"lr": (0.1, 1)}, {"search": {"a": (1, 2)}}]
    changes += [
        {"decay": (0.5, 1)},
        {"max_fresh_examples": 100},
        {"higher_is_better": False},
        {"evaluate_budget": 9},
    ]
    for change in changes:
        assert make_study(**change).fingerprint != make_study().fingerprint
    assert make_study(lambda *_: learn).fingerprint != make_study().fingerprint


def test_a_study_is_read_from_its_file(folder: Path) -> None:
    (folder / "my_study_file.py").write_text(FILE)
    found = load_study(folder / "my_study_file.py")
    assert isinstance(found, Study)
    assert found.train is sys.modules["my_study_file"].train  # so that worker processes can import it
    assert found.ranges == {"lr": (0.1, 0.1), "decay": (0.25, 1.0)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train = 3", "study_file.py defines no study: expected a line such as study = stretto.study.Study"),
        ("study = 3", "study of .*study_file.py is a int: expected a line"),
        ("import no_such_package", "study_file.py fails: ModuleNotFoundError: No module named 'no_such_package'"),
        ("\nraise SystemExit(3)", r"study_file.py fails: SystemExit: 3 \(study_file.py, line 2\)"),
        ("\nno such line", r"study_file.py fails: SyntaxError: invalid syntax \(study_file.py, line 2\)"),
        (FILE.replace("target=1", "target='1'"), "fails: TypeError: target='1' is a str"),
    ],
)
def test_a_file_without_a_study_is_refused(folder: Path, text: str, says: str) -> None:
    (folder / "study_file.py").write_text(text)
    sys.modules.pop("study_file", None)
    with pytest.raises((ValueError, RuntimeError), match=says):
        load_study(folder / "study_file.py")


def test_a_file_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.py: there is no such file"):
        load_study(folder / "absent.py")
