"""The console that all reports are printed on: plain text without a terminal."""

from typing import TextIO

from rich.console import Console

_PLAIN_WIDTH = 120


def console(file: TextIO) -> Console:
    """On a terminal of its width, elsewhere of 120 columns, whatever FORCE_COLOR says; numbers are not coloured."""
    is_terminal = getattr(file, "isatty", bool)()  # what a script puts in the place of stdout may only write
    return Console(file=file, highlight=False, width=None if is_terminal else _PLAIN_WIDTH)
