"""What making each batch costs, inside a loader's worker processes, on data sets that know nothing of it.

    loader.worker_init_fn = timed_init(spec, original)    while workers start: they time the fetchers torch makes
    time_fetcher(iterator._dataset_fetcher, spec, -1)     without workers

What they wrote can be read while they run (worker_logs.py).

A fetcher stays the object that torch made and gets a subclass's `fetch`, so the data set, its iterator and
`get_worker_info().dataset` are the script's own; for the length of a fetch the members of its transforms are timed
ones (members.py). The frames of this module are taken out of an error's traceback.

To time a member costs two readings of two clocks for each call, 2 to 4 us: after the first two batches the members
are timed in as many batches as half a percent of the time allows; in the others "read" is not known either.
"""

import contextlib
import itertools
import json
import math
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from threading import get_ident
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher, _MapDatasetFetcher

from stretto.echo.workers.parts import Echoed
from stretto.profile.items import NUM_HASHED, NUM_HASHED_ITERATIONS, RandomWatch, item_bytes, item_hash
from stretto.profile.members import COLLATE, READ, Members, StageClock, find_members, put_back, swap_in, switch_s
from stretto.profile.rows import RowWriter
from stretto.profile.worker_logs import COLUMNS

_ALWAYS_TIMED = 2
_SHARE = 0.005
_FLUSH_S = 0.5
_NUM_LOOKED_AT = 4  # examples of which the bytes of each stage are counted
_WATCHED_FETCHES = (1, 4)


@dataclass(frozen=True)
class WorkerSpec:
    """Where the workers of one iteration write, and its number and the loader's in the names of their files."""

    directory: str
    loader: int
    iteration: int


@dataclass(frozen=True)
class _TimedInit:
    spec: WorkerSpec
    original: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        if self.original is not None:
            try:
                self.original(worker_id)
            except BaseException as error:
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next
                raise
        _time_next_fetchers(self.spec, worker_id)


def timed_init(spec: WorkerSpec, original: Callable[[int], Any] | None) -> Callable[[int], None]:
    """What to put in the place of `worker_init_fn` while a loader starts its workers; can be pickled if that can.

    Persistent workers count the iterations that follow on from `spec.iteration`.
    """
    return _TimedInit(spec, original)


def _time_next_fetchers(spec: WorkerSpec, worker_id: int) -> None:
    make = _BaseDatasetFetcher.__init__
    iterations = itertools.count(spec.iteration)
    recorders: list[_Recorder] = []

    def close() -> None:
        while recorders:
            recorders.pop().close()

    def __init__(fetcher: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(fetcher, dataset, *args, **kwargs)
        info = get_worker_info()
        if info is not None and info.dataset is dataset:  # and not that of a loader inside the data set
            close()  # of the iteration before, in a persistent worker
            time_fetcher(fetcher, replace(spec, iteration=next(iterations)), worker_id)
            recorders.append(fetcher.stretto_recorder)

    Finalize(None, close, exitpriority=0)  # a worker's atexit does not run
    _BaseDatasetFetcher.__init__ = __init__  # type: ignore[assignment, method-assign]


class _TimedFetch:
    """Goes before a fetcher's class."""

    stretto_recorder: "_Recorder"

    def fetch(self, index: Any) -> Any:
        recorder = self.stretto_recorder
        try:
            recorder.begin(index)
            batch = super().fetch(index)  # type: ignore[misc]
        except BaseException as error:
            if error.__traceback__ is not None:  # the bare raise does not add this frame again
                error.__traceback__ = error.__traceback__.tb_next
            raise
        finally:
            recorder.stop()
        recorder.record(batch)
        return batch


_timed_classes: dict[type, type] = {}


def time_fetcher(fetcher: Any, spec: WorkerSpec, worker_id: int) -> None:
    """Time what `fetcher`, one of torch's, fetches from now on; nothing if it is timed already."""
    kind = type(fetcher)
    if not isinstance(fetcher, _BaseDatasetFetcher) or isinstance(fetcher, _TimedFetch):
        return
    if kind not in _timed_classes:
        _timed_classes[kind] = type(kind.__name__, (_TimedFetch, kind), {})
    recorder = _Recorder(fetcher, spec, worker_id)
    fetcher.collate_fn = recorder.collate
    fetcher.stretto_recorder = recorder  # type: ignore[attr-defined]
    fetcher.__class__ = _timed_classes[kind]
    weakref.finalize(fetcher, recorder.close)  # at the iteration's end, and at the interpreter's


class _Recorder:
    """Times the fetches of one fetcher in one process, and writes a row for each batch."""

    def __init__(self, fetcher: Any, spec: WorkerSpec, worker_id: int) -> None:
        self._dataset = fetcher.dataset
        self._collate_fn = fetcher.collate_fn
        self._is_batched = fetcher.auto_collation
        self._is_map_style = isinstance(fetcher, _MapDatasetFetcher)
        self._spec, self._worker_id, self._pid = spec, worker_id, os.getpid()
        self._clock = StageClock()
        self._core_wait = _CoreWait()
        self._members = Members((READ, COLLATE), [])
        self._is_swapped = self._is_timed = False
        self._writer: RowWriter | None = None
        self._num_files = self._num_fetches = self._num_hashed = 0
        self._names: tuple[str, ...] = ()
        self._looks: list[list[float]] = []
        self._num_examples = 1
        self._batch_bytes: float | None = None
        self._flushed = float("-inf")
        self._work_s = self._spent_s = self._cost_s = 0.0
        is_keyed = isinstance(self._dataset, Echoed)
        self._watch: RandomWatch | None = None
        self._is_watched, self._watches = False, not is_keyed
        self._hashed_each = 0 if is_keyed else self._choose_hashed()
        self._items: RowWriter | None = None

    # -- around a fetch --

    def begin(self, index: Any) -> None:
        self._index = index
        self._num_fetches += 1
        self._is_watched = self._watches and self._num_fetches in _WATCHED_FETCHES
        if self._is_watched:
            if self._watch is None:
                self._watch = RandomWatch(self._dataset)
            else:
                self._watch.begin()
        self._prepare()
        self._core_wait.begin()
        self._clock.begin(len(self._members.names))
        self._begin_s, self._begin_cpu_s = self._clock.last, self._clock.last_cpu

    def _prepare(self) -> None:
        """Put timed members in place if it is their turn."""
        if self._num_fetches > _ALWAYS_TIMED and self._spent_s + self._cost_s > _SHARE * self._work_s:
            self._is_timed = not self._members.places
            self._clock.look = None
            return
        start = time.perf_counter()
        self._find()
        if self._members.places:
            self._is_swapped = swap_in(self._members, self._clock)
        self._is_timed = self._is_swapped or not self._members.places
        # What is seen goes into the file's first line, so it is looked for until that is written.
        self._clock.look = self._look if self._is_timed and self._writer is None else None
        self._cost_s = time.perf_counter() - start
        self._spent_s += self._cost_s

    def _find(self) -> None:
        if isinstance(self._dataset, Echoed):
            # Now, not at its first batch, through timed members and in another order.
            self._dataset.parts.reading.held()
            self._dataset.parts.finishing.held()
        try:
            self._members = find_members(self._dataset)
        except Exception:  # a class of the script's that does not like to be looked at
            self._members = Members((READ, COLLATE), [])
        if self._members.names != self._names:
            self._close_file()
            self._names = self._members.names
            self._looks = [[] for _ in self._names]
            self._unknown = [math.nan] * (2 * len(self._names) - 2)

    def collate(self, data: Any) -> Any:
        """The loader's collate_fn, timed."""
        clock = self._clock
        clock.switch(len(self._members.names) - 1)
        self._num_examples = len(data) if self._is_batched and isinstance(data, list | tuple) else 1
        if clock.look is not None and not self._members.places:
            for item in data[:_NUM_LOOKED_AT] if self._is_batched and isinstance(data, list | tuple) else [data]:
                self._count(0, item)
            clock.resume()
        if self._hashed_each and self._num_hashed < NUM_HASHED:
            self._hash_items(data)
            clock.resume()
        try:
            return self._collate_fn(data)
        except BaseException as error:
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            raise
        finally:
            clock.end()

    def stop(self) -> None:
        """The fetch has returned or raised."""
        if self._clock.thread:  # it raised before collate_fn was called
            self._clock.end()
        if self._is_swapped:
            self._is_swapped = False
            put_back()

    def record(self, batch: Any) -> None:
        """Write the row of a batch."""
        clock = self._clock
        begin, end, core_wait = self._begin_s, clock.last, self._core_wait.end()
        if self._is_watched and self._watch is not None:
            self._watch.end()
            self._write_watch(self._watch)
        if self._is_timed or self._batch_bytes is None:
            self._batch_bytes = item_bytes(batch) or 0.0
        if clock.look is not None and not self._looks[-1]:
            self._count(len(self._names) - 1, batch)
        if self._is_timed:
            stages = [seconds for pair in zip(clock.wall_s, clock.cpu_s, strict=True) for seconds in pair]
        else:
            stages = [*self._unknown, clock.wall_s[-1], clock.cpu_s[-1]]
        if self._writer is None:
            self._open_file()
        assert self._writer is not None
        cpu_s = clock.last_cpu - self._begin_cpu_s
        self._writer.write(begin, end, cpu_s, core_wait, self._num_examples, self._batch_bytes, *stages)
        if end - self._flushed > _FLUSH_S:
            self._flushed = end
            self._writer.flush()
            if self._items is not None:
                self._items.flush()
        self._work_s += end - begin
        if self._members.places and self._is_timed:
            switches_s = clock.num_switches * switch_s()
            self._cost_s += switches_s
            self._spent_s += switches_s

    # -- looking at items --

    def _look(self, stage: int, argument: Any, result: Any) -> None:
        if stage == 1:
            self._count(0, argument)
        self._count(stage, result)

    def _count(self, stage: int, item: Any) -> None:
        looks = self._looks[stage]
        if len(looks) < _NUM_LOOKED_AT and (num_bytes := item_bytes(item)) is not None:
            looks.append(num_bytes)

    def _choose_hashed(self) -> int:
        """Every how manieth index is hashed, the same in all processes and iterations; 0 for none."""
        if not self._is_map_style or self._spec.iteration > NUM_HASHED_ITERATIONS:
            return 0
        try:
            return max(1, len(self._dataset) // NUM_HASHED)
        except Exception:  # not every data set has a length
            return 0

    def _hash_items(self, data: Any) -> None:
        indices, items = (self._index, data) if self._is_batched else ([self._index], [data])
        if not (
            isinstance(indices, list | tuple) and isinstance(items, list | tuple) and len(indices) == len(items)
        ):
            return  # columns, or examples left out
        each = self._hashed_each
        try:
            chosen = [(index, item) for index, item in zip(indices, items, strict=True) if not index % each]
        except TypeError:  # indices that are no numbers
            return
        for index, item in chosen:
            self._num_hashed += 1
            if (value := item_hash(item)) is not None:
                if self._items is None:
                    header = {"iteration": self._spec.iteration}
                    self._items = RowWriter(self._path("items", "rows"), 2, header)
                self._items.write(float(index), float(value))

    # -- files --

    def _path(self, kind: str, suffix: str) -> Path:
        spec = self._spec
        name = f"{kind}-{spec.loader}-{spec.iteration}-{self._worker_id}-{self._pid}-{self._num_files}.{suffix}"
        return Path(spec.directory) / name

    def _open_file(self) -> None:
        header = {
            "loader": self._spec.loader,
            "iteration": self._spec.iteration,
            "worker_id": self._worker_id,
            "pid": self._pid,
            "stages": self._names,
            "item_bytes": [sum(looks) / len(looks) if looks else None for looks in self._looks],
        }
        self._writer = RowWriter(self._path("worker", "rows"), len(COLUMNS) + 2 * len(self._names), header)
        self._num_files += 1

    def _write_watch(self, watch: RandomWatch) -> None:
        record = {
            "loader": self._spec.loader,
            "iteration": self._spec.iteration,
            "worker_id": self._worker_id,
            "dataset": type(self._dataset).__name__,
            "is_surely_augmentation": self._is_map_style and bool(self._members.places),
            "names": watch.names,
            "start": watch.start,
            "moved": watch.moved,
        }
        with contextlib.suppress(OSError):  # a full disk ends the recording, never the training
            name = f"random-{self._spec.loader}-{self._spec.iteration}-{self._worker_id}-{self._pid}.json"
            (Path(self._spec.directory) / name).write_text(json.dumps(record))

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Write what is left; not in a process forked from this one, where it is a copy."""
        if os.getpid() == self._pid:
            self._close_file()
            if self._items is not None:
                self._items.close()
            self._core_wait.close()


class _CoreWait:
    """Seconds that this thread could run but had no core, since `begin`: Linux counts them, elsewhere 0."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._thread = 0
        self._start_ns = 0

    def begin(self) -> None:
        if self._thread != (thread := get_ident()):
            self.close()
            self._thread = thread
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._start_ns = self._read()

    def end(self) -> float:
        return (self._read() - self._start_ns) / 1e9

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            return int(os.pread(self._file, 128, 0).split(None, 2)[1])
        except (OSError, IndexError):  # the thread is gone, or a system that counts none
            return self._start_ns

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
