"""The row files of a run as lanes of a trace: what each rank and each worker did when."""

from collections.abc import Iterator
from pathlib import Path

from stretto.profile.measure import RankFiles, read_ranks
from stretto.profile.trace import Counter, Span

_LOOP = 0
_OTHER = 1
_FIRST_WORKER = 10


def trace_events(directory: Path) -> list[Span | Counter]:
    """Waits, updates and what lies between for each rank, and the batches that its workers made."""
    return [event for files in read_ranks(directory) for event in _of_rank(files)]


def _of_rank(files: RankFiles) -> Iterator[Span | Counter]:
    meta, timeline = files.meta, files.timeline
    process = int(meta["pid"])
    name = f"rank {meta['rank']}"
    names = {loader["number"]: loader["name"] for loader in meta["loaders"]}
    for at in range(len(timeline.begin)):
        begin, end = float(timeline.begin[at]), float(timeline.end[at])
        loader = names[int(timeline.loader[at])]
        wait = "wait for an epoch's first batch" if timeline.is_first[at] else "wait"
        yield Span(process, name, _LOOP, "training loop", wait, begin, end, {"loader": loader, "batch": at})
        done = float(end + timeline.shown_step[at])
        label = "update" if timeline.steps[at] else "step without update"
        args: dict[str, str | int | float | None] = {"batch": at, "optimizer steps": int(timeline.steps[at])}
        yield Span(process, name, _LOOP, "training loop", label, end, done, args)
        if at + 1 < len(timeline.begin) and timeline.other[at] > 1e-4:
            until = float(timeline.begin[at + 1])
            since = max(done, until - float(timeline.other[at]))
            yield Span(process, name, _OTHER, "other", "validation, checkpoints", since, until, {})
        yield Counter(process, "echoing factor", end, float(timeline.factor[at]))
    for log in files.workers:
        thread = _FIRST_WORKER + 100 * log.loader + log.worker_id
        title = f"{names.get(log.loader, 'loader')}: " + (
            f"worker {log.worker_id}" if log.worker_id >= 0 else "in this process"
        )
        for at in range(len(log.begin)):
            args = {"CPU ms": 1e3 * float(log.cpu_s[at]), "iteration": log.iteration}
            yield Span(process, name, thread, title, "make a batch", float(log.begin[at]), float(log.end[at]), args)
