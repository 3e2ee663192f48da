"""The console that all reports are printed on: plain text without a terminal."""

from typing import TextIO

from rich.console import Console

_PLAIN_WIDTH = 120


def console(file: TextIO) -> Console:
    """On a terminal of its width, elsewhere of 120 columns, whatever FORCE_COLOR says; numbers are not coloured."""
    return Console(file=file, highlight=False, width=None if file.isatty() else _PLAIN_WIDTH)
