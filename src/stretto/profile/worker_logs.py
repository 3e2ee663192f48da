"""Reading what worker.py wrote: a file of rows for each process, iteration and set of stages."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stretto.profile.members import COLLATE
from stretto.profile.pipeline import FloatArray, Stage
from stretto.profile.rows import read_rows

COLUMNS = ("begin", "end", "cpu_s", "core_wait_s", "num_examples", "num_bytes")
"""Of a row; then follow wall and CPU seconds of each stage."""


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """What one process recorded of one iteration while the stages were the same. Rows are batches, in order."""

    loader: int
    iteration: int
    worker_id: int
    """-1 for the process that iterates, without workers."""
    pid: int
    stage_names: tuple[str, ...]
    """ "read" first, "collate" last."""
    item_bytes: tuple[float | None, ...]
    """Mean bytes of what each stage returned for the first examples ("collate": the batch)."""
    begin: FloatArray
    """time.perf_counter, one clock for all processes of a Linux system."""
    end: FloatArray
    cpu_s: FloatArray
    """Of the process, all its threads."""
    core_wait_s: FloatArray
    num_examples: FloatArray
    """1 where the data set makes the batches itself."""
    num_bytes: FloatArray
    """Of the batch, or of the last one that was counted."""
    stage_wall_s: FloatArray
    """[batches, stages], for the whole batch. NaN in batches whose stages were not timed; never for "collate"."""
    stage_cpu_s: FloatArray

    def take(self, which: slice) -> "WorkerLog":
        """Some of the batches."""
        names = (*COLUMNS, "stage_wall_s", "stage_cpu_s")
        return replace(self, **{name: getattr(self, name)[which] for name in names})


def read_worker_logs(directory: str | Path) -> list[WorkerLog]:
    """What has been written so far, by loader, iteration, worker and time; not files cut in their first line."""
    logs = []
    for path in Path(directory).glob("worker-*.rows"):
        try:
            header, rows = read_rows(path)
        except (OSError, ValueError):  # killed while it wrote the first line
            continue
        per_stage = rows[:, len(COLUMNS) :]
        logs.append(
            WorkerLog(
                **{name: header[name] for name in ("loader", "iteration", "worker_id", "pid")},
                stage_names=tuple(header["stages"]),
                item_bytes=tuple(header["item_bytes"]),
                **dict(zip(COLUMNS, rows.T, strict=False)),
                stage_wall_s=per_stage[:, 0::2],
                stage_cpu_s=per_stage[:, 1::2],
            )
        )
    return sorted(logs, key=lambda log: (log.loader, log.iteration, log.worker_id, log.begin[:1].tolist()))


def mean_stages(logs: Iterable[WorkerLog]) -> tuple[Stage, ...]:
    """The stages of some logs with their means per example ("collate": per batch), those of one name together.

    Only batches whose stages were timed count.
    """
    names = list(dict.fromkeys(name for log in logs for name in log.stage_names if name != COLLATE))
    stages = []
    for name in [*names, COLLATE]:
        wall_s = cpu_s = count = 0.0
        sizes: list[float] = []
        for log in logs:
            if name not in log.stage_names:
                continue
            at = log.stage_names.index(name)
            is_timed = ~np.isnan(log.stage_wall_s[:, at])
            wall_s += float(log.stage_wall_s[is_timed, at].sum())
            cpu_s += float(log.stage_cpu_s[is_timed, at].sum())
            count += float(is_timed.sum() if name == COLLATE else log.num_examples[is_timed].sum())
            sizes += [size for size in [log.item_bytes[at]] if size is not None]
        if count:
            mean_size = sum(sizes) / len(sizes) if sizes else None
            stages.append(Stage(name=name, wall_s=wall_s / count, cpu_s=cpu_s / count, item_bytes=mean_size))
    return tuple(stages)
