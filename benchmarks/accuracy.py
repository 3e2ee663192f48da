"""What staleness costs in accuracy: backpropagation, DSP and its peers, each at its own best learning rate.

A model is cut into K blocks and trained in one process by `simulate`, which computes what K processes compute. The
rate of each row is chosen on training examples that no run trains on; then seeds are run on the test set, the same
for every row, with the same initial weights and batches. Only counts matter, so this may run beside other work.

    Fashion-MNIST   12,000 images, a residual net of width 8 with batch norm, K = 2, 3, 4; also a short run
    digits          8x8, the same net
    text            English definitions, a character-level Transformer of 4 layers, perplexity

Every finished run is a line of results/accuracy/<workload>.jsonl (in the folder of --out if that is given) and is
not run again: a study that was killed goes on where it stopped.
"""

import argparse
import multiprocessing
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from accuracy_data import load
from accuracy_methods import MAX_RATES, RATE_SEED, Plan, Row, full_plans, map_conditions, quick_plans
from accuracy_report import METHODS, SHORT_RUNS_PAY_MOST, Interval, draw_map, paired_difference, reference_of, table
from accuracy_runs import Condition, Run, Store, run
from harness import Report, Spread, prepare_process
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).parents[1]
BAR_POINTS = -0.5
_COST = {"text": 1.2, "digits": 0.3, "made-up": 0.3}
"""An update's, relative to Fashion-MNIST's: for the time left."""


class Study:
    """Runs what is missing, in processes of one thread, and keeps it."""

    def __init__(self, store: Store, executor: Executor, progress: Progress, total: Iterable[Condition]) -> None:
        self._store = store
        self._executor = executor
        self._progress = progress
        self._total = sum(map(_cost, total))
        self._task = progress.add_task("", total=self._total)

    def run(self, wanted: Iterable[Condition], what: str) -> None:
        """Do the runs that are not there."""
        wanted = list(dict.fromkeys(wanted))
        self._progress.update(self._task, description=what)
        missing = [condition for condition in wanted if condition not in self._store.runs]
        self._progress.advance(self._task, sum(map(_cost, set(wanted) - set(missing))))
        for future in as_completed([self._executor.submit(run, condition) for condition in missing]):
            finished = future.result()
            self._store.add(finished)
            self._progress.advance(self._task, _cost(finished.condition))

    def scores(self, conditions: Sequence[Condition]) -> list[float]:
        """Of finished runs; higher is better."""
        sign = -1 if conditions[0].workload == "text" else 1
        return [sign * self._store.runs[condition].score for condition in conditions]

    def runs(self, conditions: Sequence[Condition]) -> list[Run]:
        """Finished runs."""
        return [self._store.runs[condition] for condition in conditions]

    def choose_rates(self, plan: Plan) -> dict[Row, float]:
        """The rate of each row with the best mean score on held-out examples."""
        grids = {row: list(plan.rates) for row in plan.rows}
        best: dict[Row, float] = {}
        new = [c for row, rates in grids.items() for rate in rates for c in _rate_runs(row, rate)]
        while new:
            self.run(new, f"{plan.name}: rates")
            new = []
            for row, rates in grids.items():
                by_score = {rate: sum(self.scores(_rate_runs(row, rate))) for rate in rates}
                best[row] = max(rates, key=by_score.__getitem__)
                if 1 < len(rates) < MAX_RATES and best[row] in (rates[0], rates[-1]):
                    beyond = best[row] / 2 if best[row] == rates[0] else best[row] * 2
                    grids[row] = sorted([*rates, beyond])
                    new += _rate_runs(row, beyond)
            self._total += sum(map(_cost, new))
            self._progress.update(self._task, total=self._total)
        for row, rates in grids.items():
            if len(rates) > 1 and best[row] in (rates[0], rates[-1]):
                self._progress.console.print(
                    f"  {plan.name}, {row.title}: the best rate, {best[row]:g}, is at the edge of "
                    f"{rates[0]:g} .. {rates[-1]:g}: a better one may lie beyond"
                )
        return best


def _rate_runs(row: Row, rate: float) -> list[Condition]:
    return [row.on("held-out", rate, RATE_SEED + seed, row.rate_updates) for seed in range(row.rate_seeds)]


def _test_runs(row: Row, rate: float) -> list[Condition]:
    return [row.on("test", rate, seed) for seed in range(row.num_seeds)]


def _expected(plans: Sequence[Plan]) -> list[Condition]:
    """About what there is to do: which rates are best is not known yet."""
    found: dict[Condition, None] = {}
    for plan in plans:
        for row in plan.rows:
            found |= dict.fromkeys(c for rate in plan.rates for c in _rate_runs(row, rate))
            found |= dict.fromkeys(_test_runs(row, plan.rates[0]))
    return list(found)


def _cost(condition: Condition) -> float:
    return condition.updates * _COST.get(condition.workload, 1.0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _only_finished(plan: Plan, store: Store) -> Plan:
    """The plan with the rows whose runs are all there."""

    def is_finished(row: Row) -> bool:
        tried = {c.lr for c in store.runs if c == row.on("held-out", c.lr, c.seed, row.rate_updates)}
        return any(all(c in store.runs for c in _test_runs(row, rate)) for rate in tried)

    return replace(plan, rows=tuple(filter(is_finished, plan.rows)))


def judge(report: Report, plan: Plan, runs: dict[Row, list[Run]]) -> None:
    """Record each row's mean difference with its 95 % interval."""
    unit = "perplexity" if plan.rows[0].base.workload == "text" else "points"
    mean = Interval.of([r.score for r in runs[plan.rows[0]]])
    report.add(f"{plan.name}: backpropagation", Spread(mean.mean, mean.low, mean.high), unit)
    for row in plan.rows:
        reference = reference_of(plan, row)
        if row is not reference:
            found = paired_difference(runs, row, reference)
            bar = BAR_POINTS if row.title in plan.bars else None
            what = f"{plan.name}: {row.title}, minus"
            report.add(what, Spread(found.mean, found.low, found.high), unit, at_least=bar)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="run shortly, judge nothing and write nothing")
    parser.add_argument("--full", action="store_true", help="50,000 images, longer text, all seeds: most of a day")
    parser.add_argument(
        "--only", help="one table (fashion, short, digits or text); its runs are kept, no page is written"
    )
    parser.add_argument("--finished", action="store_true", help="run nothing; the tables of rows that are complete")
    parser.add_argument("--rounds", type=int, default=5, help="seeds of a row (default 5)")
    parser.add_argument(
        "--processes", type=int, help="side by side, of one thread each (default 2, 1 with --quick)"
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes (default benchmarks/results/accuracy.json)")
    arguments = parser.parse_args()
    if arguments.processes is None:
        arguments.processes = 1 if arguments.quick else 2
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if not arguments.quick:
        prepare_process()
    report = Report("accuracy", arguments)
    plans = quick_plans() if arguments.quick else full_plans(full=arguments.full, seeds=arguments.rounds)
    if arguments.only:
        names = [plan.name for plan in plans]
        if arguments.only not in names:
            raise SystemExit(f"--only {arguments.only}: expected one of {', '.join(names)}")
        plans = [plan for plan in plans if plan.name == arguments.only]
    results = ROOT / "benchmarks/results" if arguments.out is None else arguments.out.parent
    store = Store(None if arguments.quick else results / "accuracy")
    if arguments.finished:
        plans = [plan for plan in (_only_finished(plan, store) for plan in plans) if plan.rows]
    has_map = not (arguments.quick or arguments.only or arguments.finished)
    on_map = map_conditions(plans[0].rows[0].base.workload) if has_map else {}
    for workload in dict.fromkeys(plan.rows[0].base.workload for plan in plans):
        load(workload, "held-out")  # what is missing is fetched once, and what cannot be is known now
    load.cache_clear()
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with (
        ProcessPoolExecutor(
            arguments.processes, multiprocessing.get_context("spawn"), initializer=_die_with_parent
        ) as executor,
        Progress(*columns, TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()) as progress,
    ):
        study = Study(store, executor, progress, [*_expected(plans), *on_map.values()])
        try:
            tables = [METHODS]
            for plan in plans:
                rates = study.choose_rates(plan)
                conditions = {row: _test_runs(row, rates[row]) for row in plan.rows}
                study.run([c for of_row in conditions.values() for c in of_row], f"{plan.name}: test")
                runs = {row: study.runs(of_row) for row, of_row in conditions.items()}
                judge(report, plan, runs)
                tables.append(table(plan, rates, runs))
                if plan.name == "short":
                    tables.append(SHORT_RUNS_PAY_MOST)
            study.run(on_map.values(), "map")
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.kill()
            raise
    text = "\n\n".join(tables)
    print(text)
    if not arguments.only or arguments.out is not None:
        report.finish(text, "docs/pipelining.md")
    if has_map and arguments.out is None:
        scores = {place: study.runs([condition])[0].score for place, condition in on_map.items()}
        (ROOT / "docs/staleness_map.svg").write_text(draw_map(scores))


if __name__ == "__main__":
    main()
