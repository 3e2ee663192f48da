"""Seconds to a test accuracy from a slow store, R = t_up / t_down near 6, with and without echo.

The study's workload `resnet_fashion`, its fresh batches read from SeaweedFS through the demonstration's link: each
connection has a rate at which R is 6, measured anew for every seed. The conditions of a seed run one after the
other, from the same initial weights, with the settings that the study found best for the nearest condition. The
link stands still while the model is evaluated, and that time is not counted; the start of the workers is.

For other R nothing is run: with overlap a run is N(1) / N(e) * min(1, R / e) times as fast as one without echo
(Choi, Passos, Shallue, Dahl, arXiv 1907.05550, section 2). N comes from the study
(results/study/resnet_fashion.jsonl), for factors that it does not have from the runs here; t_down is that of an
update with echo, its drawing and augmentation included.

Every finished run is a line of results/study/store_runs.jsonl (beside --out if that is given) and is not run again.
"""

from dataclasses import replace
from pathlib import Path

import torch
from harness import Report, parse_arguments
from study_store_report import Findings, add_lines, tables
from study_store_runs import BASELINE, CONDITIONS, TIMED, Wanted, make_runs, open_slow_store, tuned
from workloads import resnet_fashion as workload

from stretto.study.records import read
from stretto.study.search import FIRST_REPEAT_SEED

RESULTS = Path(__file__).parent / "results/study"
STUDY_RUNS = RESULTS / "resnet_fashion.jsonl"
RUNS = RESULTS / "store_runs.jsonl"
PAGE = "docs/evidence.md"
QUICK_TARGET = 45.0


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=3)
    report = Report("study_store", arguments)
    torch.set_num_threads(1)
    study, conditions = workload.study, CONDITIONS
    path: Path | None = RUNS
    found = list({record.task: record for record in read(STUDY_RUNS, study.fingerprint)}.values())
    if arguments.quick:
        conditions, path = (BASELINE, TIMED), None
    elif arguments.out is not None:
        path = arguments.out.with_name(f"{arguments.out.stem}_runs.jsonl")
    wanted = [
        Wanted(condition, tuple(tuned(study, found, condition).items()), FIRST_REPEAT_SEED + number)
        for number in range(arguments.rounds)
        for condition in (conditions if number % 2 == 0 else conditions[::-1])
    ]
    trained = replace(study, target=QUICK_TARGET) if arguments.quick else study
    timed = make_runs(trained, wanted, path, open_slow_store, report.note)
    findings = Findings.of(study, timed, found)
    add_lines(report, findings)
    print(tables(findings))
    report.finish(tables(findings), PAGE)


if __name__ == "__main__":
    main()
