"""What a repeated use is worth: the fresh examples N(e) that a run needed to its target, over N(1).

Measured by benchmarks/fresh_examples.py with a small net on Fashion-MNIST, 3 seeds, medians; 1 / e is ideal.
Another model on other data gives other numbers, so whoever shows them says where they come from.
"""

import math
from itertools import pairwise
from typing import Literal

Where = Literal["before", "after", "batch"]
"""Examples before augmentation, examples after it, whole batches."""

MEASURED_ON = "Fashion-MNIST"
"""The data set."""
SOURCE = f"measured on {MEASURED_ON} (benchmarks/results/fresh_examples.json)"

MEASURED: dict[Where, dict[int, float]] = {
    "before": {1: 1.0, 2: 0.5169969512195122, 4: 0.3016796875, 8: 0.1671875},
    "after": {1: 1.0, 2: 0.6724665178571428, 4: 0.4016294642857143, 8: 0.33864955357142856},
    "batch": {1: 1.0, 2: 0.6097560975609756, 4: 0.41097560975609754, 8: 0.29634146341463413},
}


def worth(where: Where, factor: float) -> float | None:
    """N(factor) / N(1), never better than 1 / factor; None beyond the factors that were measured.

    Between two of those it follows the power of e that joins them.
    """
    points = sorted(MEASURED[where].items())
    for (low, at_low), (high, at_high) in pairwise(points):
        if low <= factor <= high:
            part = math.log(factor / low) / math.log(high / low)
            between = at_low * math.exp(part * math.log(at_high / at_low))
            return max(between, 1 / factor)
    return None


def speedup_to_target(where: Where, factor: float, updates_ratio: float) -> float | None:
    """How much sooner a target is reached by `updates_ratio` times the updates a second; None as for `worth`.

    With N(e) / N(1) = w a target takes e w times the updates.
    """
    cost = worth(where, factor)
    return None if cost is None else updates_ratio / (factor * cost)
