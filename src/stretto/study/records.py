"""Finished runs as lines of JSON, so that another machine continues where this one stopped."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.study.conditions import Condition
from stretto.study.run import Run

VERSION = 1
_BEGINNING = b'{"version": '  # of a line, which may have been cut off


@dataclass(frozen=True, slots=True)
class Task:
    """A run that a study wants: a trial of the search, or with `is_repeat` the best trial with a fresh seed."""

    condition: Condition
    trial: int
    """The trial's number, which its point of the search space follows from."""
    seed: int
    is_repeat: bool = False

    @property
    def key(self) -> str:
        """What it is known by among the runs of its condition."""
        return f"trial {self.trial}, seed {self.seed}" if self.is_repeat else f"trial {self.trial}"


@dataclass(frozen=True, slots=True)
class Record:
    """A finished run, and what it was for."""

    task: Task
    run: Run


def append(path: Path, fingerprint: Mapping[str, Any], record: Record) -> None:
    """Add a line to the file, in one write, as other processes may do at the same time."""
    line = {
        "version": VERSION,
        "study": dict(fingerprint),
        "trial": record.task.trial,
        "is_repeat": record.task.is_repeat,
        **record.run.to_plain(),
    }
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        is_cut_off = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, b"\n" * is_cut_off + json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def read(path: Path, fingerprint: Mapping[str, Any]) -> list[Record]:
    """The runs in a file, none if there is no file. What a killed process left unfinished is passed over.

    Raises ValueError if the runs are of another study, with what differs, or the file is none of runs.
    """
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            if not (text.startswith(_BEGINNING) or _BEGINNING.startswith(text)):
                raise ValueError(
                    f"{path}, line {number}: {text[:60]!r} is no run; expected a file that "
                    "stretto study wrote: choose another place for --runs"
                ) from None
            continue
        if not isinstance(line, dict) or line.pop("version", None) != VERSION or "study" not in line:
            raise ValueError(
                f"{path}, line {number} is no run of version {VERSION}: choose another place for --runs"
            )
        check_same(f"{path}, line {number}", line.pop("study"), fingerprint)
        trial, is_repeat = line.pop("trial"), line.pop("is_repeat")
        run = Run.from_plain(line)
        found.append(Record(Task(run.condition, trial, run.seed, is_repeat), run))
    return found


def is_preferred(run: Run, to: Run) -> bool:
    """Whether a run counts in place of another of its task.

    One that did not crash counts before one that did, then one with the final metric before one without.
    """
    return _quality(run) > _quality(to)


def best_of(records: Iterable[Record]) -> dict[Task, Record]:
    """Of each task the run that counts; the later of two that are as good."""
    found: dict[Task, Record] = {}
    for record in records:
        before = found.get(record.task)
        if before is None or not is_preferred(before.run, record.run):
            found[record.task] = record
    return found


def check_same(where: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError, naming both values of all that differs, if two fingerprints are not of one study."""
    differing = [
        f"{name} is {found.get(name)!r} there and {expected.get(name)!r} here"
        for name in expected.keys() | found.keys()
        if found.get(name) != expected.get(name)
    ]
    if differing:
        raise ValueError(
            f"{where} belongs to another study: {'; '.join(sorted(differing))}. Nothing was changed; make the "
            "study as it was, or choose another place"
        )


def _quality(run: Run) -> tuple[bool, bool]:
    return run.status != "crashed", run.final is not None
