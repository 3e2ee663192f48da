"""What the verbs share: errors, files of JSON."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from stretto.console import console


def fail(verb: str, error: Exception | str, code: int) -> NoReturn:
    """Print the error and end with the exit code."""
    console(sys.stderr).print(f"stretto {verb}: {error}", style="red", markup=False)
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
