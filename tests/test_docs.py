"""The code in README.md and docs/ runs, and the figures are those that the benchmarks wrote."""

import importlib
import json
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


def test_the_table_in_the_readme_is_the_one_that_the_benchmark_wrote() -> None:
    readme = (ROOT / "README.md").read_text()
    record = json.loads((ROOT / "benchmarks/results/demo_runs.json").read_text())
    for row in record["starved"]["rows"]:
        line = f"| {row['title']} | {row['fresh_examples']:,.0f} | {row['updates']:,.0f} | {row['seconds']:.1f} |"
        assert line in readme


@pytest.mark.parametrize(
    ("benchmark", "guide"),
    [
        *((name, "pipelining") for name in ("accuracy", "both")),
        *((name, "pipelining") for name in ("pipeline_emulated", "pipeline_memory", "pipeline_speed")),
        ("study_store", "evidence"),
    ],
)
def test_the_tables_in_the_guides_are_those_of_the_records(benchmark: str, guide: str) -> None:
    table = json.loads((ROOT / f"benchmarks/results/{benchmark}.json").read_text())["table"]
    page = (ROOT / f"docs/{guide}.md").read_text()
    assert f"<!-- made by benchmarks/{benchmark}.py -->\n{table}\n<!-- end -->" in page


@pytest.mark.parametrize("benchmark", ["jpeg", "fresh_examples", "advice", "meter", "echo_gap"])
def test_the_tables_in_the_guide_are_those_that_the_benchmarks_wrote(
    benchmark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module(benchmark)
    if benchmark == "fresh_examples":
        table = module.tables(module.read_runs(module.RUNS))
    else:
        table = module.table(json.loads((ROOT / f"benchmarks/results/{benchmark}.json").read_text())["results"])
    pages = {"jpeg": "where", "fresh_examples": "where", "echo_gap": "echo"}
    page = (ROOT / f"docs/{pages.get(benchmark, 'profile')}.md").read_text()
    assert f"<!-- made by benchmarks/{benchmark}.py -->\n{table}\n<!-- end -->" in page
