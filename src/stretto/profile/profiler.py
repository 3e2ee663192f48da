"""`stretto.profile`: a loader and a step measured together and apart, in this process.

    live        the loop as it is, every fetch and step timed                -> what the updates wait for
    headspace   the step alone, on one batch again and again                 -> t_down, the least a batch can cost
    upstream    the loader alone, nothing done with its batches              -> t_up
    again       some examples read twice, one after the other                -> what a cache of reads would save

So the stalls of Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training" (VLDB 2021), come apart: of
what the live loop waits for data the preparation part would stay if every read came from a cache, the rest is the
fetch part.
"""

import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from stretto.echo.loader import EchoLoader
from stretto.echo.settings import check_int
from stretto.echo.workers.parts import Echoed
from stretto.profile.build import Ending, build_record
from stretto.profile.hooks import Hooks
from stretto.profile.meter import Meter
from stretto.profile.schema import AdviceRecord, RunRecord
from stretto.profile.spans import trace_events
from stretto.profile.trace import Counter, Span, write_trace
from stretto.tree import clone

_MOST_ALONE = 50  # batches of a run of one side alone
_MOST_REREAD = 32  # examples read twice
_SAVES = 0.05  # the share of a read from which on a second read counts as cheaper


@dataclass(frozen=True, kw_only=True, slots=True)
class Stalls:
    """Of one batch, in seconds."""

    live_s: float
    """From one batch to the next in the live loop, without the start of epochs."""
    data_stall_s: float
    """The part of it that was waited for a batch: fetch and preparation stall."""
    headspace_s: float
    """t_down: the step alone, on a batch that is there."""
    upstream_s: float
    """t_up: the loader alone."""
    first_read_s: float | None
    """An example read for the first time in this process; None where the data set cannot be asked for one."""
    second_read_s: float | None
    """The same example read again at once: from the system's cache, or the data set's own."""
    fetch_stall_s: float
    """The part of the data stall that reads from a cache would save."""
    preparation_stall_s: float
    """The rest: decoding, augmenting, collating, and handing batches over."""
    transfer_stall_s: float
    """Copying a batch to the accelerator."""

    @property
    def slowed_s(self) -> float:
        """What the step takes longer in the live loop than alone: workers and step share the cores."""
        return max(0.0, self.live_s - self.data_stall_s - self.transfer_stall_s - self.headspace_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """What `stretto.profile` found. `print` shows it; the files are those of `stretto run`."""

    record: RunRecord
    """See stretto.profile.schema."""
    stalls: Stalls
    events: list[Span | Counter]

    @property
    def verdict(self) -> str:
        """What the loop waits for, in a line."""
        return self.record["verdict"]

    @property
    def advice(self) -> list[AdviceRecord]:
        """What to do, best first, with what it is predicted to give."""
        return self.record["advice"]

    @property
    def au_percent(self) -> float:
        """Accelerator utilisation of the live loop: time in update steps / total time, in percent."""
        return self.record["ranks"][0]["au_percent"]

    @property
    def ratio(self) -> float:
        """R = t_up / t_down, each measured alone (arXiv 1907.05550, section 2)."""
        return self.stalls.upstream_s / self.stalls.headspace_s if self.stalls.headspace_s else float("inf")

    def __str__(self) -> str:
        """The report as plain text."""
        from stretto.console import console  # noqa: PLC0415  (rich, only where it prints)
        from stretto.profile.report import print_report  # noqa: PLC0415

        file = io.StringIO()
        print_report(self.record, console(file))
        return file.getvalue()

    def save_json(self, path: str | Path) -> None:
        """Write the record, as `stretto run --json`."""
        Path(path).write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")

    def save_html(self, path: str | Path) -> None:
        """Write the page, as `stretto run --html`. Raises RuntimeError without stretto[report]."""
        from stretto.profile.html.page import write_page  # noqa: PLC0415  (optional dependencies)

        write_page(self.record, Path(path))

    def save_trace(self, path: str | Path) -> None:
        """Write a trace for https://ui.perfetto.dev, as `stretto run --trace`."""
        write_trace(Path(path), events=self.events)


def profile(loader: Iterable[Any], step: Callable[[Any], Any], *, updates: int = 100, warmup: int = 10) -> Profile:
    """Measure what `step` waits for when it is fed by `loader`, and what would help.

    Args:
        loader: a re-iterable of batches; of a DataLoader the workers are looked into, too.
        step: does what training does with a batch, such as moving it to the device, forward, backward and an
            optimizer step. It is called about `updates` + `warmup` + 50 times, so a model in it is trained.
        updates: batches of the live loop that are measured; the loader is iterated again if it ends earlier.
        warmup: batches before them that are not.

    Returns the record, the stalls and the advice; the process is as before.

    Raises:
        TypeError: `loader` cannot be iterated twice, or `step` cannot be called.
        ValueError: `updates` < 2 or `warmup` < 1, or the loader is empty.
    """
    check_int("updates", updates, at_least=2)
    check_int("warmup", warmup, at_least=1)
    if isinstance(loader, Iterator) or not hasattr(type(loader), "__iter__"):
        raise TypeError(
            f"loader is a {type(loader).__name__}: expected a re-iterable such as a DataLoader or a list, which "
            "gives a new iterator for every pass"
        )
    if not callable(step):
        raise TypeError(f"step={step!r} is a {type(step).__name__}: expected a function of a batch")
    with tempfile.TemporaryDirectory(prefix="stretto-profile-") as name:
        return _measure(loader, step, updates, warmup, Path(name))


def _measure(
    loader: Iterable[Any], step: Callable[[Any], Any], updates: int, warmup: int, directory: Path
) -> Profile:
    first_s, second_s = _read_twice(loader)
    upstream_s = _upstream_alone(loader, min(updates + warmup, _MOST_ALONE))
    meter = Meter(directory)
    hooks = Hooks(meter)
    ending = Ending(command=[*sys.orig_argv], options={"updates": updates, "warmup": warmup})
    hooks.install()
    try:
        batch = _live(loader, step, meter, updates + warmup)
    finally:
        hooks.remove()
        meter.finish()
    headspace_s = _step_alone(batch, step, min(updates, _MOST_ALONE))
    log = meter.log_of(loader)
    if not isinstance(loader, DataLoader | EchoLoader):
        # Whether another kind of loader works while the step runs is seen from outside only.
        live_s = _live_seconds(build_record(directory, ending, skip=warmup))[0]
        log.description["num_workers"] = int(live_s < 0.9 * (upstream_s + headspace_s))
        meter.save()
    ending.set_status(0)
    record = build_record(directory, ending, skip=warmup)
    stalls = _split(record, headspace_s, upstream_s, first_s, second_s)
    record["evidence"] += _sentences(stalls, record["ranks"][0]["loaders"][0]["overlaps"])
    return Profile(record, stalls, trace_events(directory))


def _live(loader: Iterable[Any], step: Callable[[Any], Any], meter: Meter, num_batches: int) -> Any:
    """Run the loop. Returns a batch as the loader gave it."""
    kept: Any = None
    num_done, own_step = 0, Step()
    meter.log_of(loader).is_training = True  # by definition, also if each pass has but one batch
    while num_done < num_batches:
        before = num_done
        for batch in meter.begin(loader, lambda: iter(loader), lambda _: None):
            if num_done == 0:
                kept = _copy_of(batch)
            num_updates = meter.updates
            step(batch)
            if meter.updates == num_updates:  # the step has no optimizer of torch's
                meter.stepped(own_step)
            num_done += 1
            if num_done == num_batches:
                break
        if num_done == before:
            raise ValueError("the loader is empty: a pass had no batch. Expected at least one")
    return kept


def _step_alone(batch: Any, step: Callable[[Any], Any], num_batches: int) -> float:
    """Mean seconds of the step on a batch that is there."""
    total_s = 0.0
    for _ in range(num_batches):
        own = _copy_of(batch)
        begin = time.perf_counter()
        step(own)
        total_s += time.perf_counter() - begin
    return total_s / num_batches


def _copy_of(batch: Any) -> Any:
    """A copy, since the step may change its batch in place; the batch itself where it cannot be copied."""
    try:
        return clone(batch)
    except Exception:
        return batch


def _upstream_alone(loader: Iterable[Any], num_batches: int) -> float:
    """Mean seconds of a batch from the loader alone, without the start of passes that have more than one."""
    total_s, num_done = 0.0, 0
    while num_done < num_batches:
        begin = time.perf_counter()
        batches = iter(loader)
        if next(batches, batches) is batches:
            raise ValueError("the loader is empty: a pass had no batch. Expected at least one")
        started = time.perf_counter()
        num = sum(1 for _ in itertools.islice(batches, num_batches - num_done))
        total_s += time.perf_counter() - (started if num else begin)
        num_done += num or 1
    return total_s / num_done


class Step:
    """Stands for an optimizer of torch's where the step has none."""


class _Twice(Dataset[Any]):
    """Reads an example twice, and returns the seconds of both instead."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> list[float]:
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            self._dataset[index]
            times.append(time.perf_counter() - begin)
        return times


def _read_twice(loader: Iterable[Any]) -> tuple[float | None, float | None]:
    """Mean seconds of an example's first and second read, on the first examples that the loader's sampler names.

    In a worker if the loader has some: a file that the data set opens at its first read must not be shared by fork.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None, None
    dataset = loader.dataset.dataset if isinstance(loader.dataset, Echoed) else loader.dataset
    try:
        with torch.random.fork_rng(devices=[]):
            indices = list(itertools.islice(_indices(loader), _MOST_REREAD))
        reread = DataLoader(
            _Twice(dataset),
            batch_size=None,
            sampler=indices,
            num_workers=min(1, loader.num_workers),
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator(),
            multiprocessing_context=loader.multiprocessing_context,
        )
        times = list(reread)
    except Exception:  # of the data set's or the sampler's: the live loop will tell, if it concerns that at all
        return None, None
    if not times:
        return None, None
    first, second = (sum(column) / len(times) for column in zip(*times, strict=True))
    return first, second


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    if isinstance(loader.dataset, Echoed):  # its plan is not to be drawn from
        return iter(range(len(loader.dataset.dataset)))
    if loader.batch_sampler is None or isinstance(loader.batch_sampler, BatchSampler):
        return iter(loader.sampler)
    return itertools.chain.from_iterable(loader.batch_sampler)


def _live_seconds(record: RunRecord) -> tuple[float, float, float]:
    """Means for a batch: all, the wait, the transfer. Without the start of epochs, if they have more batches."""
    rank = record["ranks"][0]
    time_of, num = rank["time"], max(1, rank["batches"])
    transfer_s = time_of["transfer_s"] / num
    wait_s = rank["wait_ms"]["mean"] / 1e3 or time_of["first_wait_s"] / num
    return wait_s + time_of["update_s"] / num + transfer_s, wait_s, transfer_s


def _split(
    record: RunRecord, headspace_s: float, upstream_s: float, first_s: float | None, second_s: float | None
) -> Stalls:
    loader = record["ranks"][0]["loaders"][0]
    live_s, data_s, transfer_s = _live_seconds(record)
    saved_s = 0.0
    if first_s is not None and second_s is not None and second_s < (1 - _SAVES) * first_s:
        saved_s = first_s - second_s
    # What a worker waits inside "read" is the store's time, too, if the data set caches nothing.
    waiting_s = sum(max(0.0, s["wall_ms"] - s["cpu_ms"]) / 1e3 for s in loader["stages"] if s["name"] == "read")
    per_batch = max(saved_s, waiting_s) * (loader["batch_size"] or 1) / max(1, loader["num_workers"])
    cached_s = max(0.0, upstream_s - per_batch)
    kept_s = max(0.0, cached_s - headspace_s) if loader["overlaps"] else cached_s
    preparation_s = min(data_s, kept_s)
    return Stalls(
        live_s=live_s,
        data_stall_s=data_s,
        headspace_s=headspace_s,
        upstream_s=upstream_s,
        first_read_s=first_s,
        second_read_s=second_s,
        fetch_stall_s=data_s - preparation_s,
        preparation_stall_s=preparation_s,
        transfer_stall_s=transfer_s,
    )


def _sentences(stalls: Stalls, overlaps: bool) -> list[str]:
    found = [
        f"Alone, the step takes {1e3 * stalls.headspace_s:.2f} ms and the loader {1e3 * stalls.upstream_s:.2f} ms "
        f"a batch; together they take {1e3 * stalls.live_s:.2f} ms"
        + (
            f", {1e3 * stalls.slowed_s:.2f} ms of it because they share the cores."
            if overlaps and stalls.slowed_s
            else "."
        ),
        f"Of a data stall of {1e3 * stalls.data_stall_s:.2f} ms a batch, {1e3 * stalls.fetch_stall_s:.2f} ms would "
        f"go if reads came from a cache, {1e3 * stalls.preparation_stall_s:.2f} ms are preparation"
        + (f", {1e3 * stalls.transfer_stall_s:.2f} ms transfer." if stalls.transfer_stall_s else "."),
    ]
    if stalls.first_read_s is not None and stalls.second_read_s is not None:
        found.append(
            f"An example takes {1e3 * stalls.first_read_s:.2f} ms when first read in this process, "
            f"{1e3 * stalls.second_read_s:.2f} ms when read again at once."
        )
    return found
