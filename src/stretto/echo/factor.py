"""Echoing factors: how many times each fresh item is used.

A number is kept exactly: an item gets floor(e) uses plus one more with probability frac(e), decided for each
item by a random number keyed by (seed, pass, index of the item in the pass). "auto" has no number of its own:
an item is used until it is replaced, at most `max_factor` times, and the realised factor follows R.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.echo.keyed import derive_key, uniform

Factor = float | Literal["auto"]

_USES = 0x05E5  # the purpose of the stream that decides the fractional use
_STRATA = 16


def check_factor(factor: object) -> Factor:
    """Return `factor` if it is a number >= 1 or "auto".

    Raises TypeError for another type, ValueError for a number below 1, NaN, infinity or another string.
    """
    if isinstance(factor, str):
        if factor != "auto":
            raise ValueError(f'factor={factor!r}: expected a number >= 1 or "auto"')
        return "auto"
    if isinstance(factor, bool) or not isinstance(factor, int | float | np.integer | np.floating):
        raise TypeError(f'factor={factor!r} is a {type(factor).__name__}: expected a number >= 1 or "auto"')
    if not 1 <= factor < math.inf:
        raise ValueError(
            f"factor={factor}: expected a finite number >= 1. It counts all uses of an item: 1 is no echo, "
            "2 uses everything twice"
        )
    return float(factor)


def default_max_factor(batch_size: int) -> int:
    """The most uses of an item under "auto": 8 for batches up to 4096 rows, 16 above.

    Larger batches profit from more uses (LM1B in arXiv 1907.05550, figure 8: best between 4 and 8 at a batch
    of 1024, above 16 at 4096).
    """
    return 8 if batch_size <= 4096 else 16


def num_uses(factor: float, seed: int, pass_index: int, start: int, count: int) -> NDArray[np.int64]:
    """Uses of the fresh items `start` to `start + count - 1` of a pass, shape [count].

    Each is floor(e), or one more with probability frac(e). Sixteen consecutive items share one stratified
    draw, which leaves every item's probability as it is and makes the realised factor of a long run exact to
    1/16 of an item's spread.
    """
    whole = math.floor(factor)
    uses = np.full(count, whole, dtype=np.int64)
    fraction = factor - whole
    if fraction == 0 or count == 0:
        return uses
    key = derive_key(seed, _USES, pass_index)
    index = np.arange(start, start + count, dtype=np.int64)
    group = index // _STRATA
    first = int(group[0])
    shift = uniform(derive_key(key, 1), first, int(group[-1]) - first + 1)[group - first]
    # Strata are visited in steps of 7 from a random one: each index sees each stratum equally often.
    stratum = (index * 7 + (shift * _STRATA).astype(np.int64)) % _STRATA
    uses += (stratum + uniform(key, start, count)) / _STRATA < fraction
    return uses
