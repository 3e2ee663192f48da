"""The slowest files begin first, so that neither of two test processes is left with one of them at the end."""

from pathlib import Path

import pytest

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
