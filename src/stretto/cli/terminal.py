"""What the verbs share: errors, files of JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from stretto.console import console


def say_error(verb: str, error: Exception | str) -> None:
    """Print the error, unbroken, so that a path in it can be copied and a line of it found."""
    console(sys.stderr).print(f"stretto {verb}: {error}", style="red", markup=False, soft_wrap=True)


def fail(verb: str, error: Exception | str, code: int) -> NoReturn:
    """Print the error and end with the exit code."""
    say_error(verb, error)
    raise typer.Exit(code)


def check_writable(path: Path | None) -> None:
    """Raise ValueError if a file cannot be written there. "-" is the standard output."""
    if path is None or str(path) == "-":
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: expected the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path}: it may not be written; choose another place")


def write_json(record: Any, path: Path) -> None:
    """Write to a file, or with "-" to the standard output."""
    text = json.dumps(record, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")
