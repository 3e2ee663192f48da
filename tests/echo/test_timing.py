"""A number as factor: what is drawn is a function of counts, whatever the speed of the loader."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from tests.echo.sources import Gated, id_batches, let_arrive

NUM_BATCHES, NUM_UPDATES = 6, 30
SETTINGS: list[dict[str, Any]] = [
    {"factor": 1},
    {"factor": 2.5, "buffer": 9},
    {"factor": 4},
    {"factor": 4, "carry_over": False, "buffer": 5},
    {"factor": 2.5, "unit": "batch"},
]


def run(source: Any, how: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """The first updates, and the fresh batches admitted by each of them."""
    with stretto.echo(source, **how) as loader:
        batches: list[list[int]] = []
        needed = []
        while len(batches) < NUM_UPDATES:
            for batch in loader:
                batches.append(batch.tolist())
                needed.append(loader.stats().fresh_batches)
        return batches[:NUM_UPDATES], needed[:NUM_UPDATES]


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def reference(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[list[int]], list[int]]:
    """Settings, with the updates and admissions of a run over a source that is always ready."""
    return request.param, *run(id_batches(NUM_BATCHES, 3, last=2), request.param)


@settings(max_examples=25)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=NUM_UPDATES, max_size=NUM_UPDATES))
def test_equal_settings_give_equal_batches_at_any_timing_of_the_source(
    reference: tuple[dict[str, Any], list[list[int]], list[int]], steps: list[tuple[int, bool]]
) -> None:
    """Before each update the source gives what that one needs, and as many more as hypothesis likes.

    It is also the test that an update waits for nothing but the batches its admission rule asks for.
    """
    how, expected, needed = reference
    source = Gated(id_batches(NUM_BATCHES, 3, last=2))
    batches: list[list[int]] = []
    with stretto.echo(source, **how) as loader, source:
        iterator = iter(loader)
        for (early, is_waiting), need in zip(steps, needed, strict=True):
            more = max(need - source.num_released, 0) + early
            source.release(more)
            if is_waiting:
                let_arrive(loader, source, 0)
            batch = next(iterator, None)
            if batch is None:
                iterator = iter(loader)
                batch = next(iterator)
            batches.append(batch.tolist())
            assert loader.stats().fresh_batches == need
    assert batches == expected
