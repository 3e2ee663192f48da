"""The plan alone: draws a second and bytes of bookkeeping with ten million residents.

One update draws 256 distinct residents of 1e7; every fourth admits 256 (factor 4). Beside it, what NumPy takes
for nothing but 256 distinct random numbers below 1e7, without uses, order, admission or resumable state.
"""

import time
import tracemalloc

import numpy as np
from harness import Report, Spread, parse_arguments, ratio, take_turns

from stretto.echo.plan import Plan

B, FACTOR = 256, 4
NUM_RESIDENTS = 10_000_000


def fill(num_residents: int) -> Plan:
    """A full plan in its steady state: an equal share of the residents has 1, 2, 3 and 4 uses left."""
    plan = Plan(num_residents + B, FACTOR, seed=0)
    admitted = 0
    while admitted < num_residents:
        count = min(100_000, num_residents - admitted)
        plan.admit(plan.lend(count), np.arange(count) % FACTOR + 1)
        admitted += count
    return plan


def update(plan: Plan, num_residents: int) -> None:
    while plan.num_live + B <= num_residents:
        plan.admit(plan.lend(B), FACTOR)
    plan.draw(B)


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=15)
    report = Report("plan", arguments)
    num_residents = NUM_RESIDENTS // 10 if arguments.quick else NUM_RESIDENTS
    num_updates = 500 if arguments.quick else 5000

    tracemalloc.start()
    plan = fill(num_residents)
    tracemalloc.reset_peak()
    for _ in range(200):
        update(plan, num_residents)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = [value for value in vars(plan).values() if isinstance(value, np.ndarray)]
    owners = {id(owner): owner for owner in (a if a.base is None else a.base for a in arrays)}
    num_bytes = sum(owner.nbytes for owner in owners.values())

    rng = np.random.default_rng(0)

    def drawn_by_plan() -> float:
        start = time.perf_counter()
        for _ in range(num_updates):
            update(plan, num_residents)
        return B * num_updates / (time.perf_counter() - start) / 1e6

    def drawn_by_numpy() -> float:
        start = time.perf_counter()
        for _ in range(num_updates):
            rng.choice(num_residents, B, replace=False)
        return B * num_updates / (time.perf_counter() - start) / 1e6

    rates = take_turns({"plan": drawn_by_plan, "numpy": drawn_by_numpy}, arguments.rounds)
    report.note(f"{num_residents:,} residents, {B} an update, factor {FACTOR}")
    report.add("draws of the plan, with admissions", Spread.of(rates["plan"]), "million/s", at_least=4.0)
    report.add("numpy's choice(replace=False), numbers only", Spread.of(rates["numpy"]), "million/s")
    report.add("plan / numpy's choice", ratio(rates["plan"], rates["numpy"]), "")
    report.add("arrays of the plan", Spread.of([num_bytes / 1e6]), "MB", at_most=100.0)
    report.add("peak of traced memory while drawing", Spread.of([peak / 1e6]), "MB", at_most=100.0)
    report.finish()


if __name__ == "__main__":
    main()
