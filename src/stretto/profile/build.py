"""The record of a run: what all its processes wrote, merged, with the verdict and the advice."""

import math
import platform
import socket
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from signal import Signals
from typing import Any, cast

from stretto.profile.advise import advise, verdict
from stretto.profile.cores import usable_cores
from stretto.profile.items import find_repeated_augmentation
from stretto.profile.measure import RankFiles, measure_pipelines, measure_rank, read_ranks
from stretto.profile.pipeline import HELPS_FROM_R, Pipeline
from stretto.profile.schema import VERSION, RankRecord, RunRecord

_STANDS_OUT = 1.1  # a rank that waits so many times as long as the others' median is named
_ONE_BATCH = 0.9  # of a loader's iterations


@dataclass(slots=True)
class Ending:
    """What the parent knows of a run."""

    command: list[str]
    options: dict[str, Any]
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    begin_s: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    exit_code: int | None = None
    exit_signal: str | None = None
    problem: str | None = None
    """Why the files may not hold all that happened."""

    def set_status(self, status: int) -> None:
        """It has ended with this exit status, the negative of a signal's number where one ended it."""
        self.seconds = time.perf_counter() - self.begin_s
        self.exit_code = status if status >= 0 else None
        self.exit_signal = Signals(-status).name if status < 0 else None


def build_record(directory: Path, ending: Ending, *, skip: int = 0) -> RunRecord:
    """Merge the files in `directory`. The first `skip` batches of each process do not count."""
    files = read_ranks(directory, skip)
    trained = [rank for rank in files if len(rank.timeline.begin)]
    cores = usable_cores() / max(1, len(trained))
    pipelines = [measure_pipelines(rank, cores) for rank in trained]
    ranks = [measure_rank(rank, mine, ending.begin_s) for rank, mine in zip(trained, pipelines, strict=True)]
    if len(ranks) == 1 and trained[0].meta["ended"] is None and ending.exit_signal is not None:
        ranks[0]["ended"] = f"killed by {ending.exit_signal}"
    record = RunRecord(
        version=VERSION,
        stretto=version("stretto"),
        torch=files[0].meta["torch"] if files else "",
        python=platform.python_version(),
        host=socket.gethostname(),
        cores=usable_cores(),
        command=ending.command,
        options=ending.options,
        started=ending.started,
        seconds=ending.seconds,
        exit_code=ending.exit_code,
        exit_signal=ending.exit_signal,
        ranks=ranks,
        straggler=_straggler(ranks),
        verdict="",
        evidence=[],
        next_step="",
        advice=[],
        findings=_findings(directory, files, ending),
    )
    if not ranks:
        record["verdict"], record["evidence"], record["next_step"] = _nothing_recognised(directory, files, ending)
        return _finite(record)
    record["findings"] += needless_echoes(ranks)
    worst = max(range(len(ranks)), key=lambda at: ranks[at]["stall_percent"])
    pipeline = main_pipeline(pipelines[worst])
    record["advice"] = advise(pipeline)
    record["verdict"], record["evidence"], record["next_step"] = verdict(pipeline, record["advice"])
    return _finite(record)


def main_pipeline(pipelines: dict[int, Pipeline]) -> Pipeline:
    """The one that the updates wait for the most."""
    return max(pipelines.values(), key=lambda p: float(p.wait_s.sum() + p.first_wait_s.sum()))


def needless_echoes(ranks: list[RankRecord]) -> list[str]:
    """A sentence for each loader whose echo had no wait to fill."""
    found = [
        f"{loader['name']}: R is {loader['ratio']:.2g}, so its echo has nothing to fill: without it, updates would "
        "come as quickly, and of fresh examples"
        for rank in ranks
        for loader in rank["loaders"]
        if loader["echo"] is not None and loader["ratio"] is not None and loader["ratio"] < HELPS_FROM_R
    ]
    return list(dict.fromkeys(found))


def _straggler(ranks: list[RankRecord]) -> str | None:
    """Ranks that train together step together: the one that waits for its data holds up all others."""
    if len(ranks) < 2:
        return None
    waits = sorted((rank["time"]["wait_s"] / max(1, rank["batches"]), rank["rank"]) for rank in ranks)
    others = waits[(len(waits) - 1) // 2][0]
    worst, number = waits[-1]
    step = min(rank["step_ms"]["mean"] for rank in ranks) / 1e3
    if worst < _STANDS_OUT * others or worst - others < 0.02 * (step + others):
        return None
    return (
        f"rank {number} waits {worst * 1e3:.1f} ms for each batch, the others {others * 1e3:.1f} ms (median): what "
        "they wait for at the next exchange of gradients is this rank's data"
    )


def _findings(directory: Path, files: list[RankFiles], ending: Ending) -> list[str]:
    found = [] if ending.problem is None else [ending.problem]
    for rank in files:
        for loader in rank.meta["loaders"]:
            if loader["echo"] is None and loader["is_training"]:
                found += [f"{loader['name']}: {sentence}" for sentence in loader["repeats"]]
            if loader["why_not_echoed"]:
                found.append(f"{loader['name']} was not echoed: {loader['why_not_echoed']}")
        if rank.meta["error"]:
            found.append(f"the record of process {rank.meta['pid']} is incomplete: {rank.meta['error']}")
        found += find_repeated_augmentation(directory / f"workers-{rank.meta['pid']}")
    return list(dict.fromkeys(found))


def _nothing_recognised(directory: Path, files: list[RankFiles], ending: Ending) -> tuple[str, list[str], str]:
    """What was seen instead."""
    how = f"the script ended with exit code {ending.exit_code}"
    if ending.exit_signal is not None:
        how = f"the script was killed by {ending.exit_signal}"
    head = f"No training loader was recognised; {how} after {ending.seconds:.1f} s."
    texts = [path.read_text(encoding="utf-8") for path in sorted(directory.glob("error-*.txt"))]
    if errors := [text.splitlines() for text in texts if text]:  # empty on a full disk
        return (
            head,
            [f"{errors[0][0]}: stretto could not be loaded there: {errors[0][-1]}"],
            f"Install stretto for the script's own Python: {errors[0][0]} -m pip install stretto",
        )
    if not files:
        return (
            head,
            [ending.problem or "no Python process that was started imported torch"],
            "Give the command that trains, such as: stretto run -- python train.py",
        )
    evidence: list[str] = []
    others: list[str] = []
    for rank in files:
        meta = rank.meta
        where = f"process {meta['pid']}: " if len(files) > 1 else ""
        if meta["ended"] and meta["ended"].startswith("raised"):
            evidence.append(f"{where}it {meta['ended']}")
        evidence += [
            f"{where}{loader['name']} over {loader['dataset'] or 'no data set'}: {loader['batches']} batches in "
            f"{loader['iterations']} iterations{_single_batches(loader)}"
            for loader in meta["loaders"]
        ]
        if not meta["loaders"]:
            evidence.append(f"{where}no torch DataLoader was iterated")
        if meta["optimizers"]:
            evidence.append(f"{where}optimizers that stepped: {', '.join(meta['optimizers'])}")
        else:
            evidence.append(f"{where}no torch optimizer stepped")
        others += meta["other_optimizers"]
    if others:
        names = ", ".join(sorted(set(others)))
        evidence.append(f"optimizers that are not torch's, whose steps cannot be seen: {names}")
    step = (
        "A training loader is a torch DataLoader of which two batches in one iteration were each followed by a "
        "step of a torch.optim.Optimizer. For anything else, measure the loop with stretto.profile(loader, step)"
    )
    return head, evidence, step


def _single_batches(loader: dict[str, Any]) -> str:
    if loader["iterations"] > 2 and loader["batches"] < loader["iterations"] / _ONE_BATCH:
        return ": next(iter(loader)) starts the loader, and its workers, anew for each batch; keep the iterator"
    return ""


def _finite(record: RunRecord) -> RunRecord:
    return cast(RunRecord, _without_nan(record))


def _without_nan(record: Any) -> Any:
    """Without infinities and NaN, which JSON does not have: they become None."""
    if isinstance(record, dict):
        return {key: _without_nan(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [_without_nan(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record
