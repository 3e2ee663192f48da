"""The points of the search space that are tried: a function of the ranges and the trial's number alone."""

import math
from collections.abc import Mapping

from scipy.stats import qmc

from stretto.study.study import Study

_EDGE = 0.2  # of a range, at each end: of three trials the second and the third lie there


def point(study: Study, number: int) -> dict[str, float]:
    """The point of trial `number`, from 0: of a Halton sequence, shifted to begin in the middle of all ranges.

    So all conditions try the same points, in every process, and more trials only add to them. The bases are 3, 5,
    7 and so on, in the order of the ranges: the first three trials are the middles of three thirds of the first.
    """
    ranges = study.ranges
    halton = qmc.Halton(len(ranges) + 1, scramble=False).random(number + 1)
    places = (halton[number, 1:] + 0.5) % 1
    found = {}
    for (name, (low, high)), place in zip(ranges.items(), places.tolist(), strict=True):
        if study.is_log(name):
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        found[name] = min(max(value, low), high)  # rounding must not leave the range
    return found


def at_edge(study: Study, params: Mapping[str, float]) -> list[str]:
    """A sentence for each setting whose value lies within a fifth of its range from an end of it."""
    said = []
    for name, (low, high) in study.ranges.items():
        if low == high:
            continue
        if study.is_log(name):
            place = math.log(params[name] / low) / math.log(high / low)
        else:
            place = (params[name] - low) / (high - low)
        is_bound = name == "decay" and high == 1  # there is nothing beyond
        if place < _EDGE or (place > 1 - _EDGE and not is_bound):
            end = "lower" if place < _EDGE else "upper"
            said.append(f"{name} = {params[name]:.3g} is at the {end} end of its range, {low:g} .. {high:g}")
    return said
