"""The points of the search space that are tried: a function of the ranges and the trial's number alone."""

import math
from collections.abc import Mapping

import numpy as np
from scipy.stats import qmc

from stretto.study.study import Study

_SCRAMBLE = 1907  # of the Halton sequence, for all studies
_EDGE = 0.1  # of a range, at each end


def point(study: Study, number: int) -> dict[str, float]:
    """The point of trial `number`, from 0: the middle of all ranges, then the scrambled Halton sequence.

    So all conditions try the same points, in every process, and more trials only add to them.
    """
    ranges = study.ranges
    if number == 0:
        places = [0.5] * len(ranges)
    else:
        halton = qmc.Halton(len(ranges), scramble=True, seed=np.random.default_rng(_SCRAMBLE))
        places = halton.random(number)[number - 1].tolist()
    found = {}
    for (name, (low, high)), place in zip(ranges.items(), places, strict=True):
        if study.is_log(name):
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        found[name] = min(max(value, low), high)  # rounding must not leave the range
    return found


def at_edge(study: Study, params: Mapping[str, float]) -> list[str]:
    """A sentence for each setting whose value lies within a tenth of its range from an end of it."""
    said = []
    for name, (low, high) in study.ranges.items():
        if low == high:
            continue
        if study.is_log(name):
            place = math.log(params[name] / low) / math.log(high / low)
        else:
            place = (params[name] - low) / (high - low)
        if not _EDGE <= place <= 1 - _EDGE:
            end = "lower" if place < _EDGE else "upper"
            said.append(f"{name} = {params[name]:.3g} is at the {end} end of its range, {low:g} .. {high:g}")
    return said
