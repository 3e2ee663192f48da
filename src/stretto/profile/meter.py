"""Every fetch of a batch and every optimizer step of this process, with their times, in a file.

    loader ----iter()----> Iteration ----next()----> row FETCH      which loaders train: those in whose single
    optimizer ----step()---------------------------> row STEP       iteration two steps each followed a fetch

A row costs about two microseconds. Nothing here draws random numbers or looks into a batch on an accelerator.
What is known about the loaders is kept beside the rows in a JSON file that is replaced as it changes.
"""

import contextlib
import gc
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from stretto.echo.loader import EchoLoader
from stretto.echo.settings import rank_and_world_size
from stretto.profile.batches import describe_loader, echo_reader
from stretto.profile.device import DeviceClock
from stretto.profile.iteration import NUM_COLUMNS, Iteration, Kind, LoaderLog
from stretto.profile.rows import RowWriter

_FLUSH_S = 0.5
_SAVE_EVERY = 4  # flushes
_STEPS_OF_TRAINING = 2
_LOOKS_FOR_OTHERS = 3  # iterations at whose end other optimizers are looked for: 0.1 s each

Source = Callable[[Iteration, list[Iteration]], Iterator[Any] | None]


class Meter:
    """Writes what happens in this process into `directory`.

    Args:
        directory: where the files go; the process's number is part of their names.
        max_updates: the fetch after so many updates raises SystemExit(0); None for no limit.
        begin_echo: asked once a training loader is recognised and at each of its iterations, whether something
            takes the place of its batches.
    """

    def __init__(
        self, directory: Path, *, max_updates: int | None = None, begin_echo: Source | None = None
    ) -> None:
        self.directory = directory
        self.updates = 0
        self._was_stopped = False
        self._max_updates = max_updates
        self._begin_echo = begin_echo
        self._lock = threading.RLock()
        self._is_fork = False
        self._loaders: dict[int, tuple[Callable[[], Any], LoaderLog]] = {}
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._rows = RowWriter(self.directory / f"rank-{self._pid}.rows", NUM_COLUMNS, {"pid": self._pid})
        self._logs: list[LoaderLog] = []
        self._active: tuple[weakref.ref[Iteration], ...] = ()  # a dropped iteration is to end its workers
        self._has_asked = False
        self._other_optimizers: set[str] = set()
        self._looks_for_others = _LOOKS_FOR_OTHERS
        self._ended: str | None = None  # iterations that are dropped later are still recorded
        self._optimizers: dict[str, int] = {}
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers
        self._trained: set[int] = set()  # the ids of their parameters
        self.is_evaluating = False
        self._device = "cpu"
        self._device_clock: DeviceClock | None = None
        self._num_iterations = 0
        self._flushed_s = time.perf_counter()
        self._num_flushes = 0

    def forked(self) -> None:
        """This is a child: it has its own files, if it trains at all."""
        self._lock = threading.RLock()
        self._loaders = {}
        self.updates = 0
        self._is_fork = True
        self._start()

    # -- what the hooks call --

    def begin(self, loader: Any, make: Callable[[], Iterator[Any]], prepare: Callable[[Any], None]) -> Iteration:
        """An iteration of `loader`, over what `make` returns; `prepare` sees a loader first that may train."""
        log = self.log_of(loader)
        if torch.is_grad_enabled():
            prepare(loader)
            log.description = describe_loader(loader)
        with self._lock:
            number = self._num_iterations = self._num_iterations + 1
        log.iterations += 1
        iteration = Iteration(self, log, number, loader)
        begin, cpu = time.perf_counter(), time.process_time()
        iteration.start(make)
        row = (number, begin, time.perf_counter(), cpu, time.process_time(), float(torch.is_grad_enabled()))
        self._write(Kind.ITER, log.number, *row)
        return iteration

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped (`torch.optim.Optimizer`'s post hook)."""
        now, cpu = time.perf_counter(), time.process_time()
        name = type(optimizer).__name__
        if optimizer not in self._seen:
            self._optimizers.setdefault(name, len(self._optimizers))
            self._see_parameters(optimizer)
        is_update, self._has_asked = self._has_asked, False
        for reference in self._active:
            iteration = reference()
            if iteration is None or not iteration.has_fetched:
                continue
            iteration.has_fetched = False
            iteration.num_steps += 1
            log = iteration.log
            if iteration.num_steps == _STEPS_OF_TRAINING:
                log.is_training = True
                log.is_known_to_train |= iteration.may_be_echoed
                self.save()
        self.updates += is_update
        self._write(Kind.STEP, self._optimizers[name], 0, now, now, cpu, cpu, float(is_update))

    def mode_set(self, module: torch.nn.Module, is_training: bool) -> None:
        """`train()` or `eval()` was called: on a model in training it says what the next iteration is for."""
        if self._trained and any(id(parameter) in self._trained for parameter in module.parameters()):
            self.is_evaluating = not is_training

    def log_of(self, loader: Any) -> LoaderLog:
        """The log of a loader, made at its first iteration."""
        with self._lock:
            reference, log = self._loaders.get(id(loader), (None, None))
            if reference is None or log is None or reference() is not loader:
                log = LoaderLog(len(self._logs), describe_loader(loader), read_echo=echo_reader(loader))
                self._logs.append(log)
                if isinstance(loader, EchoLoader):
                    log.wraps = self.log_of(loader.wrapped).number
                self._loaders[id(loader)] = (_reference(loader), log)
            return log

    def workers_directory(self) -> Path:
        """Where this process's loader workers write."""
        path = self.directory / f"workers-{os.getpid()}"
        with contextlib.suppress(OSError):
            path.mkdir(exist_ok=True)
        return path

    def finish(self, ended: str = "finished") -> None:
        """Write what is left, and how the process ended (`RankRecord.ended`) if not at `max_updates`."""
        if self._pid != os.getpid() or (self._is_fork and not self._logs and not self._optimizers):
            return
        self._ended = f"stopped after {self.updates} updates" if self._was_stopped else ended
        self._look_for_others()
        self.save()

    def save(self) -> None:
        """Write the rows so far, and replace the file of what is known."""
        if not self._logs and not self._optimizers and self._ended is None:
            return
        with self._lock:  # as one: a file that two threads write is none
            self._save()

    def _save(self) -> None:
        now = time.perf_counter()
        for log in self._logs:
            if (factor := log.realised_factor()) is not None:
                self._rows.write(Kind.ECHO, log.number, 0, now, now, 0, 0, factor)
        self._rows.flush()
        rank, world_size = rank_and_world_size()
        if world_size == 1:
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        meta = {
            "pid": self._pid,
            "rank": rank,
            "world_size": world_size,
            "host": socket.gethostname(),
            "device": self._device,
            "torch": torch.__version__,
            "is_worker": torch.utils.data.get_worker_info() is not None,
            "optimizers": list(self._optimizers),
            "other_optimizers": sorted(self._other_optimizers),
            "loaders": [log.to_json() for log in self._logs],
            "ended": self._ended,
            "error": self._rows.error,
        }
        path = self.directory / f"rank-{self._pid}.json"
        with contextlib.suppress(OSError):  # the rows' own error says it
            path.with_suffix(".new").write_text(json.dumps(meta, default=str), encoding="utf-8")
            path.with_suffix(".new").replace(path)

    # -- what iterations call --

    def fetched(self, iteration: Iteration, begin: float, cpu: float, queued: int) -> float:
        """A batch has arrived. Returns the time."""
        end, cpu_end = time.perf_counter(), time.process_time()
        log = iteration.log
        log.batches += 1
        self._has_asked |= torch.is_grad_enabled()
        self._write(Kind.FETCH, log.number, iteration.number, begin, end, cpu, cpu_end, float(queued))
        return end

    def check_limit(self, iteration: Iteration) -> None:
        """Raise SystemExit(0) where --steps has been reached."""
        if self._max_updates is not None and self.updates >= self._max_updates and iteration.log.is_training:
            self._was_stopped = True
            raise SystemExit(0)

    def source_for(self, iteration: Iteration) -> Iterator[Any] | None:
        """What takes the place of the iteration's batches from here on, if anything does."""
        if self._begin_echo is None or not (iteration.log.is_known_to_train and iteration.may_be_echoed):
            return None
        together = {iteration.log: iteration}
        for reference in self._active:
            one = reference()
            is_in_use = one is not None and self.updates - one.fetched_at_update <= 1
            if one is not None and one.log.is_known_to_train and one.may_be_echoed and is_in_use:
                together.setdefault(one.log, one)
        return self._begin_echo(iteration, list(together.values()))

    def note(self, kind: Kind, iteration: Iteration, begin: float, value: float = 0.0) -> None:
        """A row about an iteration."""
        now, cpu = time.perf_counter(), time.process_time()
        self._write(kind, iteration.log.number, iteration.number, begin, now, cpu, cpu, value)

    def entered(self, iteration: Iteration) -> None:
        """It may yield."""
        with self._lock:
            self._active = (*self._active, weakref.ref(iteration))

    def ended(self, iteration: Iteration) -> None:
        """It yields nothing any more."""
        with self._lock:  # one that is being dropped has no references any more
            kept = [reference for reference in self._active if reference() not in (None, iteration)]
            self._active = tuple(kept)
        if iteration.log.is_training:
            # A loader that fetches ahead, Accelerate's say, has been asked once more before its last update.
            self._has_asked = True
            iteration.log.realised_factor()  # the script may drop the loader now
        elif self._looks_for_others and iteration.may_be_echoed:
            self._looks_for_others -= 1
            self._look_for_others()

    @property
    def device_clock(self) -> DeviceClock | None:
        """For the stalls of an accelerator; None on the CPU."""
        return self._device_clock

    def _write(self, *row: float) -> None:
        with self._lock:
            self._rows.write(*row)
            if row[4] - self._flushed_s > _FLUSH_S:
                self._flushed_s = row[4]
                self._num_flushes += 1
                if self._num_flushes % _SAVE_EVERY:
                    self._rows.flush()
                else:
                    self.save()

    def _look_for_others(self) -> None:
        """At the end of an iteration the script's optimizer is surely there, at the end of the process perhaps."""
        if not any(log.is_training for log in self._logs):
            self._other_optimizers |= _find_other_optimizers()

    def _see_parameters(self, optimizer: Any) -> None:
        parameters = [p for group in getattr(optimizer, "param_groups", ()) for p in group.get("params", ())]
        self._seen.add(optimizer)
        self._trained.update(map(id, parameters))
        if parameters and self._device == "cpu" and parameters[0].device.type != "cpu":
            self._device = str(parameters[0].device)
            self._device_clock = DeviceClock.of(parameters[0].device)


def _reference(loader: Any) -> Callable[[], Any]:
    """A weak one, where the loader's class allows it: a list's does not."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: loader


def _find_other_optimizers() -> set[str]:
    """Classes of living objects that look like optimizers, but are not torch's."""
    found = set()
    for thing in gc.get_objects():
        kind = type(thing)
        module = str(getattr(kind, "__module__", ""))  # some classes of C have a descriptor there
        if issubclass(kind, torch.optim.Optimizer) or module.startswith(("torch.", "stretto.")):
            continue
        if all(callable(getattr(kind, name, None)) for name in ("step", "zero_grad")):
            found.add(f"{module}.{kind.__qualname__}")
    return found
