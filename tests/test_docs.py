"""The code in README.md and docs/ runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks() -> list:
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        code = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [pytest.param(block, id=f"{page.name}-{number}") for number, block in enumerate(code)]
    return found


@pytest.mark.parametrize("block", blocks())
def test_code_block_runs(block: str) -> None:
    exec(compile(block, "block", "exec"), {"__name__": "block"})
