"""The study of data echoing: the paper's protocol on five workloads, by `stretto.study`.

Every finished run is a line of results/study/<file>.jsonl and is not made again: a study that was killed goes on
where it stopped, also on another machine that has the files. Only counts matter, so it may run beside other work;
the seconds of its runs are not used.

    python benchmarks/study.py                  everything, then the tables: about 8 hours of one core
    python benchmarks/study.py --tables         the tables of what there is
    python benchmarks/study.py --quick          one trial and one seed of two conditions in each workload
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness import prepare_process
from study_parts import RESULTS, Part, parts, quick
from study_tables import TABLES, Results, figure, fill, quick_table

from stretto.study import Run, Search, Watcher
from stretto.study.processes import one_thread
from stretto.study.records import Task

PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"
FIGURE = PAGE.with_name("factors.svg")
_POLL_S = 2.0


class Maker(Watcher):
    """Makes the runs of all parts in their order, beside other processes that do the same."""

    def __init__(self, wanted: Sequence[Part], num_processes: int) -> None:
        self._wanted = list(wanted)
        self._num_processes = num_processes
        self._searches: dict[Part, Search] = {}
        self._part = self._wanted[0]

    def work(self) -> None:
        """Until all runs are made."""
        while any([not self._is_done(part) for part in self._wanted]):  # noqa: C419  (opens them all)
            if not any(self._take(part) for part in self._wanted):
                time.sleep(_POLL_S)

    def ends(self, task: Task, run: Run) -> None:
        """Print a line."""
        found = f"{run.fresh_examples:,} fresh examples" if run.status == "reached" else f"best {run.best}"
        print(
            f"[{self._progress()}] {self._part.runs.stem}: {task.condition.title}: {task.key}: {run.status}, "
            f"{found}, {run.seconds:.0f} s",
            flush=True,
        )

    def _is_done(self, part: Part) -> bool:
        if part not in self._searches:
            found = part.search()
            if found is None:
                return False
            self._searches[part] = found
        return self._searches[part].is_done

    def _take(self, part: Part) -> bool:
        if self._is_done(part) or part not in self._searches:
            return False
        self._part = part
        return self._searches[part].take(self)

    def _progress(self) -> str:
        all_progress = [search.progress() for search in self._searches.values()]
        done, wanted = (sum(getattr(one, name) for one in all_progress) for name in ("num_done", "num_wanted"))
        return f"{done} of {wanted} runs"


def main() -> None:
    """Make the runs and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small table; writes nothing")
    parser.add_argument("--tables", action="store_true", help="make no runs")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at the same time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stretto-study-") as temporary:
        folder = Path(temporary) if arguments.quick else RESULTS
        wanted = list(quick(folder) if arguments.quick else parts(folder))
        if not arguments.tables:
            _make(wanted, arguments.processes)
        results = Results.load(wanted)
        if arguments.quick:
            print(quick_table(results))
        else:
            PAGE.write_text(fill(PAGE.read_text(), {name: table(results) for name, table in TABLES.items()}))
            FIGURE.write_text(figure(results))
            print(f"wrote {PAGE} and {FIGURE}")


def _make(wanted: Sequence[Part], num_processes: int) -> None:
    for workload in dict.fromkeys(part.workload for part in wanted):
        print(f"data of {workload}", flush=True)
        _load(workload)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(wanted, num_processes)) for _ in range(num_processes)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.terminate()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(f"processes ended with {[worker.exitcode for worker in workers]}")


def _load(workload: str) -> None:
    import importlib  # noqa: PLC0415

    importlib.import_module(f"workloads.{workload}").load_data()


def _work(wanted: Sequence[Part], num_processes: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with one_thread():
        Maker(wanted, num_processes).work()


if __name__ == "__main__":
    prepare_process()
    main()
