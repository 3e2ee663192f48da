"""The study of data echoing: the paper's protocol on five workloads, by `stretto.study`.

Every finished run is a line of results/study/<file>.jsonl and is not made again: a study that was killed goes on
where it stopped, also on another machine that has the files. Only counts matter, so it may run beside other work;
the seconds of its runs are not used.

    python benchmarks/study.py                  everything, then docs/evidence.md: about 4 hours of one core
    python benchmarks/study.py --tables         the page from the runs that there are
    python benchmarks/study.py --quick          one trial and one seed of two conditions in each workload
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness import prepare_process
from study_parts import WORKLOADS, Part, parts, quick
from study_tables import FIGURE, PAGES, TABLES, Results, figure, fill, quick_table

from stretto.profile.view import duration
from stretto.study import Run, Search
from stretto.study.processes import Orphan, WithParent, ends_on_terminate, one_thread
from stretto.study.records import Task

ROOT = Path(__file__).parents[1]
_POLL_S = 2.0


class Maker(WithParent):
    """Makes the runs of all parts in their order, beside other processes that do the same."""

    def __init__(self, wanted: Sequence[Part]) -> None:
        self._wanted = wanted
        self._searches: dict[Part, Search] = {}
        self._part = wanted[0]
        self._began_s = time.monotonic()
        self._done_before: int | None = None

    def work(self) -> None:
        """Until all runs are made."""
        while not all([self._is_done(part) for part in self._wanted]):  # noqa: C419  (opens them all)
            if self._done_before is None:
                self._done_before = self._counts()[0]
            if not any(self._take(part) for part in self._wanted):
                time.sleep(_POLL_S)

    def ends(self, task: Task, run: Run) -> None:
        """Print a line."""
        assert self._done_before is not None
        done, wanted = self._counts()
        pace_s = (time.monotonic() - self._began_s) / max(1, done - self._done_before)
        found = f"{run.fresh_examples:,} fresh examples" if run.status == "reached" else f"best {run.best}"
        left = duration(float(f"{pace_s * (wanted - done):.2g}"))
        print(
            f"[{done} of {wanted} runs, {left} left] {self._part.runs.stem}: {task.condition.title}: {task.key}: "
            f"{run.status}, {found}",
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

    def _counts(self) -> tuple[int, int]:
        """Runs that are made, and that are wanted."""
        done = sum(search.progress().num_done for search in self._searches.values())
        return done, sum(len(part.conditions) * (part.trials + part.seeds) for part in self._wanted)


def main() -> None:
    """Make the runs and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small table, on the terminal")
    parser.add_argument("--tables", action="store_true", help="make no runs")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="those of --quick (default: all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at the same time")
    arguments = parser.parse_args()
    if not arguments.quick:
        prepare_process()
        wanted = list(parts())
        if not arguments.tables:
            _make(wanted, arguments.processes)
        results = Results.load(wanted)
        for page, names in PAGES.items():
            path = ROOT / page
            path.write_text(fill(path.read_text(), {name: TABLES[name](results) for name in names}))
        (ROOT / FIGURE).write_text(figure(results))
        print(f"wrote {', '.join([*PAGES, FIGURE])}")
        return
    workloads = arguments.workloads.split(",")
    if unknown := set(workloads) - set(WORKLOADS):
        parser.error(f"--workloads {', '.join(sorted(unknown))}: expected some of {','.join(WORKLOADS)}")
    with tempfile.TemporaryDirectory(prefix="stretto-study-") as folder:
        wanted = list(quick(workloads, Path(folder)))
        _make(wanted, arguments.processes)
        print(quick_table(Results.load(wanted), workloads))


def _make(wanted: Sequence[Part], num_processes: int) -> None:
    """All runs. Raises SystemExit if a process fails."""
    for workload in dict.fromkeys(part.workload for part in wanted):
        importlib.import_module(f"workloads.{workload}").load_data()  # here, where one process fetches it
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(wanted,)) for _ in range(num_processes)]
    with ends_on_terminate():
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            raise SystemExit("interrupted: the same command goes on") from None
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()
    if failed := [worker.exitcode for worker in workers if worker.exitcode]:
        raise SystemExit(f"{len(failed)} of {num_processes} processes failed, with exit codes {failed}")


def _work(wanted: Sequence[Part]) -> None:
    try:
        with one_thread(), ends_on_terminate():
            Maker(wanted).work()
    except (KeyboardInterrupt, Orphan):
        sys.exit("interrupted: the same command goes on")


if __name__ == "__main__":
    main()
