"""Runs a script of scripts/ by itself, or under `stretto run`."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.profile.schema import LoaderRecord, RankRecord, RunRecord
from tests.forked import python
from tests.patience import PATIENCE_S

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
STRETTO_RUN = [sys.executable, "-c", "from stretto.cli.main import app; app()", "run"]


def environment(**more: str) -> dict[str, str]:
    """Of the children."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "500", **more}


@dataclass
class Done:
    """A command that has run."""

    code: int
    out: str
    err: str
    record: RunRecord | None = None

    @property
    def said(self) -> list[dict[str, Any]]:
        """The lines of JSON that the script printed."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith('{"name"')]

    @property
    def rank(self) -> RankRecord:
        """The only one."""
        assert self.record is not None
        (rank,) = self.record["ranks"]
        return rank

    def loaders(self, name: str) -> list[LoaderRecord]:
        """Those over the data set of this name."""
        return [loader for loader in self.rank["loaders"] if loader["dataset"] == name]


def execute(command: list[str], *, stdin: str = "", cwd: Path | None = None, **more: str) -> Done:
    """Run a command to its end."""
    done = subprocess.run(
        command,
        input=stdin,
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def run_alone(script: str, *args: str, **how: Any) -> Done:
    """As the user would without stretto."""
    return execute([sys.executable, str(SCRIPTS / script), *args], **how)


def stretto_run(folder: Path, command: list[str], *options: str, cwd: Path | None = None, **more: str) -> Done:
    """`stretto run`, with its record."""
    path = folder / "record.json"
    path.unlink(missing_ok=True)
    arguments = ["run", "--json", str(path), *options, "--", *command]
    done = python("-m", "stretto.cli", *arguments, cwd=cwd, **environment(**more))
    record = json.loads(path.read_text()) if path.exists() else None
    return Done(done.returncode, done.stdout, done.stderr, record)


def run_measured(folder: Path, script: str, *args: str, options: tuple[str, ...] = (), **how: Any) -> Done:
    """A script under `stretto run`."""
    return stretto_run(folder, [sys.executable, str(SCRIPTS / script), *args], *options, **how)


ECHOES: dict[str, tuple[str, ...] | None] = {
    "alone": None,
    "measured": (),
    "twice": ("--echo", "2"),
    "auto": ("--echo", "auto"),
}


def run_in_all_ways(tmp: Path, script: str, *args: str) -> dict[str, Done]:
    """A script without stretto, with, and echoed; two at a time."""

    def run(way: str) -> Done:
        folder = tmp / way
        folder.mkdir()
        options = ECHOES[way]
        how = {"cwd": folder}
        if options is None:
            return run_alone(script, *args, **how)
        return run_measured(folder, script, *args, options=options, **how)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ECHOES, pool.map(run, ECHOES), strict=True))
