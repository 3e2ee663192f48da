"""What is found over all ranks of a run."""

from typing import Any

import pytest

from stretto.profile.build import needless_echoes
from tests.profile import records

ECHO: dict[str, Any] = {
    "unit": "example",
    "factor": 2.0,
    "realised": 2.0,
    "uses": 80,
    "fresh_items": 40,
    "fresh_batches": 10,
    "dropped_uses": 0,
    "buffer_bytes": 1000,
    "began_at_update": 2,
}


@pytest.mark.parametrize(
    ("ratio", "echo", "is_needless"), [(0.4, ECHO, True), (1.0, ECHO, True), (1.2, ECHO, False), (0.4, None, False)]
)
def test_an_echo_with_nothing_to_fill_is_said_to_be_needless(
    ratio: float, echo: dict[str, Any] | None, is_needless: bool
) -> None:
    loader = records.loader(ratio=ratio, echo=echo)
    found = needless_echoes([records.rank_record(loaders=[loader]), records.rank_record(1, loaders=[loader])])
    assert len(found) == is_needless
    if is_needless:
        assert f"R is {ratio:.2g}, so its echo has nothing to fill" in found[0]
