"""Every test sees the same terminal and the same examples, wherever and however slowly it runs.

The slowest files begin first, so that neither of two test processes is left with one of them at the end.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from torch.utils.data import DataLoader

for name in (
    *("COLUMNS", "LINES", "TERM", "TERMINAL_WIDTH", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"),  # what rich and typer go by
):
    os.environ.pop(name, None)

# No clock, no luck, nothing of an earlier run. Registered before any test is: a test keeps what was loaded then.
NO_CLOCKS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("tests", derandomize=True, database=None, max_examples=40, **NO_CLOCKS)
settings.load_profile("tests")

SLOWEST = [
    "launch/test_plain_loops.py",
    "launch/test_frameworks.py",
    "test_benchmarks.py",
    "demo/test_run.py",
    "test_examples.py",
    "cli/test_prove.py",
    "launch/test_ranks.py",
    "echo/workers/test_accelerate.py",
    "echo/workers/test_lightning.py",
    "echo/workers/test_ranks.py",
]
PLACES = {Path(__file__).parent / name: place for place, name in enumerate(SLOWEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.get(item.path, len(SLOWEST)))


@pytest.fixture(scope="session", autouse=True)
def torch_hears_of_dead_workers() -> None:
    """A process's first DataLoader sets the handler, for good unless a Lightning trainer puts back an older one."""
    list(DataLoader(range(1), num_workers=1))  # type: ignore[arg-type]
