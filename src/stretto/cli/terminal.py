"""What the verbs share: a console that is plain without a terminal, errors, files of JSON."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

_PLAIN_WIDTH = 120


def console(*, stderr: bool = False) -> Console:
    """Of the standard output or error; without a terminal of a fixed width and plain."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def fail(verb: str, error: Exception | str, code: int) -> NoReturn:
    """Print the error and end with the exit code."""
    console(stderr=True).print(f"stretto {verb}: {error}", style="red", markup=False)
    raise typer.Exit(code)


def check_writable(path: Path | None) -> None:
    """Raise ValueError if the folder of a file that is to be written does not exist. "-" is the standard output."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.resolve().parent}; make it first")


def write_json(record: Any, path: Path) -> None:
    """Write to a file, or with "-" to the standard output."""
    text = json.dumps(record, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")
