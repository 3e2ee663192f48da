"""What went wrong in a user's code, in one line: the error and its place."""

import re
import sysconfig
from pathlib import Path

_PLACE = re.compile(r'\s*File "(?P<path>.+)", line (?P<line>\d+)')  # in a traceback
_LIBRARIES = tuple({str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
"""Folders of stretto, of Python and of what is installed: no place of the user's own."""


def cause(error: str) -> str:
    """The last line of an error; of a traceback its error's first line, with the place in the user's code."""
    lines = error.strip().splitlines()
    places = {number: match for number, line in enumerate(lines) if (match := _PLACE.match(line))}
    if not places:
        return lines[-1]
    own = [match for match in places.values() if not match["path"].startswith(_LIBRARIES)] or [*places.values()]
    behind = lines[max(places) + 1 :]
    said = next((line for line in behind if line and not line[0].isspace()), lines[-1])
    return f"{said} ({Path(own[-1]['path']).name}, line {own[-1]['line']})"
