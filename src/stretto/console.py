"""The console that all reports are printed on: plain text without a terminal."""

from typing import TextIO

from rich.console import Console

_PLAIN_WIDTH = 120


def console(file: TextIO) -> Console:
    """On a terminal of its width, elsewhere plain and 120 columns wide; numbers are not coloured."""
    found = Console(file=file, highlight=False)
    return found if found.is_terminal else Console(file=file, highlight=False, width=_PLAIN_WIDTH)
