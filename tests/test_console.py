"""The console of all reports, on what is no terminal."""

from typing import Any

import pytest

from stretto.console import console


class Tee:
    """As scripts put it in the place of stdout: it only writes."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "COLUMNS": "40"}])
def test_what_is_no_terminal_has_120_columns(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file: Any = Tee()
    console(file).print("word " * 30)
    assert [len(line.split()) for line in file.text.splitlines()] == [24, 6]
