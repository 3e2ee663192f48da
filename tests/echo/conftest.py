"""After every test no thread and no worker process is left."""

import gc
import multiprocessing
import os
from collections.abc import Iterator

import pytest

from tests.echo.sources import upstream_threads

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
