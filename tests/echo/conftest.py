"""Hypothesis without clocks or luck, and after every test: no thread and no worker process is left."""

import gc
import multiprocessing
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.echo.sources import upstream_threads

settings.register_profile("echo", derandomize=True, deadline=None, database=None, max_examples=40)
settings.load_profile("echo")
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    if upstream_threads() or multiprocessing.active_children():
        gc.collect()
    for thread in upstream_threads():
        thread.join(10)
    assert upstream_threads() == []
    assert multiprocessing.active_children() == []
