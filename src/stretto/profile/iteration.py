"""The iterator that a script gets from a loader: the loader's own, with every `next` timed."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch

from stretto.echo.upstream import THREAD_NAME
from stretto.profile.batches import Repeats, look_at
from stretto.profile.device import DeviceClock

_HERE = os.path.dirname(__file__)
_LOOKS = 3  # batches of a loader that are looked into
_TRANSFERS = 3  # batches of a loader that are copied to the accelerator once more, to time it


class Kind(IntEnum):
    """What a row says. Columns: kind, loader, iteration, begin, end, CPU seconds at both, value."""

    ITER = 0
    """`iter(loader)`; value: 1 if gradients were enabled."""
    FETCH = 1
    """A batch; value: how many were ready when it was asked for, -1 if unknown."""
    END = 2
    """The iteration had no more batches."""
    LEFT = 3
    """The iteration was dropped."""
    STEP = 4
    """An optimizer stepped; loader: the optimizer's number; it ended at `end`."""
    STALL = 5
    """For the fetch that began at `begin`; value: the seconds in which the accelerator had nothing to do."""
    ECHO = 6
    """value: the realised echoing factor so far."""


NUM_COLUMNS = 8


@dataclass(eq=False)
class LoaderLog:
    """What is known of one loader."""

    number: int
    description: dict[str, Any]
    batches: int = 0
    iterations: int = 0
    passes: int = 0
    """Iterations of its own, also those inside an EchoLoader."""
    is_training: bool = False
    is_known_to_train: bool = False
    """Recognised in an iteration that may be echoed."""
    looks: list[dict[str, Any]] = field(default_factory=list)
    transfers_s: list[float] = field(default_factory=list)
    """Seconds that copying a batch to the accelerator took, for the first ones of training."""
    repeats: Repeats = field(default_factory=Repeats)
    wraps: int | None = None
    """The number of the loader that this one, an EchoLoader, is around."""
    read_echo: Callable[[], dict[str, Any] | None] | None = None
    """How it is echoed."""
    pass_length: int | None = None
    """Batches of the last iteration that came to its end."""
    is_taken: bool = False
    """Its passes belong to an EchoLoader that the script does not know of."""
    echo: dict[str, Any] | None = None
    why_not_echoed: str | None = None

    def realised_factor(self) -> float | None:
        """Of its echo so far; None without one."""
        if self.read_echo is not None:
            self.echo = self.read_echo() or self.echo
        return None if self.echo is None else float(self.echo["realised"])

    def to_json(self) -> dict[str, Any]:
        """For the file."""
        self.realised_factor()  # reads the echo's present state
        return {
            "number": self.number,
            **self.description,
            "batches": self.batches,
            "iterations": self.iterations,
            "is_training": self.is_training,
            "looks": self.looks,
            "transfer_s": min(self.transfers_s, default=0.0),
            "repeats": self.repeats.findings(),
            "wraps": self.wraps,
            "echo": self.echo,
            "why_not_echoed": self.why_not_echoed,
        }


class Observer(Protocol):
    """What an iteration tells: the Meter."""

    updates: int
    is_evaluating: bool

    @property
    def device_clock(self) -> DeviceClock | None: ...  # noqa: D102

    def check_limit(self, iteration: "Iteration") -> None: ...  # noqa: D102
    def source_for(self, iteration: "Iteration") -> Iterator[Any] | None: ...  # noqa: D102
    def fetched(self, iteration: "Iteration", begin: float, cpu: float, queued: int) -> float: ...  # noqa: D102
    def note(self, kind: Kind, iteration: "Iteration", begin: float, value: float = 0.0) -> None: ...  # noqa: D102
    def entered(self, iteration: "Iteration") -> None: ...  # noqa: D102
    def ended(self, iteration: "Iteration") -> None: ...  # noqa: D102


class Iteration(Iterator[Any]):
    """The iterator that a script gets from `iter(loader)`: the loader's own, with every `next` timed."""

    def __init__(self, meter: Observer, log: LoaderLog, number: int, loader: Any) -> None:
        self.log = log
        self.number = number
        self.loader = loader
        self.num_steps = 0
        self.num_given = 0
        """Batches handed out."""
        self.has_fetched = False
        """Since the latest optimizer step."""
        self.fetched_at_update = meter.updates
        """How many updates there had been when the latest batch was fetched, or the iteration begun."""
        self.may_be_echoed = torch.is_grad_enabled() and not meter.is_evaluating
        self.batches: Iterator[Any] | None = None
        """The loader's own iterator; None once something else took its place."""
        self.wait_s = 0.0
        self._begun_s = time.perf_counter()
        self._meter = meter
        self._source: Iterator[Any] | None = None
        self._is_over = False

    def start(self, make: Callable[[], Iterator[Any]]) -> None:
        """Open the loader's own iterator, unless something takes its place already."""
        self._source = self._meter.source_for(self)
        if self._source is None:
            with busy(self.loader):
                self.batches = make()
        self._meter.entered(self)

    def __next__(self) -> Any:
        if self.batches is not None and is_inside(self.loader):
            return next(self.batches)  # a loader that keeps its iterator and asks it for what it yields
        meter = self._meter
        if self._is_over and self._source is not None:
            raise StopIteration
        meter.check_limit(self)
        if self._source is None:
            self._source = meter.source_for(self)
        source = self._source if self._source is not None else self.batches
        queued = _count_ready(self.batches) if self._source is None else -1
        begin, cpu = time.perf_counter(), time.process_time()
        clock = meter.device_clock
        before = clock.mark() if clock is not None else None
        try:
            with busy(self.loader):
                batch = next(source)  # type: ignore[arg-type]
        except StopIteration:
            self._is_over = True
            if self._source is None:
                self.log.pass_length = self.num_given
            meter.note(Kind.END, self, begin)
            meter.ended(self)
            raise
        except BaseException as error:
            without_our_frames(error)
            raise
        self.wait_s += meter.fetched(self, begin, cpu, queued) - begin
        if clock is not None:
            for since, stall_s in clock.measure(before, begin):
                meter.note(Kind.STALL, self, since, stall_s)
            if self.num_steps and len(self.log.transfers_s) < _TRANSFERS:
                with contextlib.suppress(Exception):  # such as no room for a second copy
                    self.log.transfers_s.append(clock.time_transfer(batch))
        self.num_given += 1
        self.has_fetched = torch.is_grad_enabled()
        self.fetched_at_update = meter.updates
        if len(self.log.looks) < _LOOKS:
            self.log.looks.append(look_at(batch))
        if self._source is None:
            with contextlib.suppress(Exception):  # as in look_at
                self.log.repeats.see(batch, self.number)
        return batch

    @property
    def elapsed_s(self) -> float:
        """Since it was begun."""
        return time.perf_counter() - self._begun_s

    @property
    def updates(self) -> int:
        """Of the process so far."""
        return self._meter.updates

    def let_go(self) -> None:
        """Something else reads the loader's own iterator from here on."""
        self.batches = None

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """The loader's own iterator's attribute."""
        if name.startswith("__") or self.__dict__.get("batches") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.batches, name)

    def __del__(self) -> None:
        if not self.__dict__.get("_is_over", True):
            self._meter.note(Kind.LEFT, self, time.perf_counter())
            self._meter.ended(self)


_local = threading.local()


class busy:  # noqa: N801
    """A loader's own code runs in this thread.

    What it iterates inside, such as `super().__iter__()`, is not an iteration of the script's.
    """

    __slots__ = ("_loader",)

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __enter__(self) -> None:
        stack = _local.__dict__.setdefault("loaders", [])
        stack.append(self._loader)

    def __exit__(self, *exc_info: object) -> None:
        _local.loaders.pop()


def without_our_frames(error: BaseException) -> None:
    """Drop this package's frames from the start of the traceback: to the script, the error is its loader's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    error.__traceback__ = trace


def is_inside(loader: Any) -> bool:
    """Whether what runs is the loader's own code, or an EchoLoader's thread, and not the script's loop."""
    if any(inside is loader for inside in _local.__dict__.get("loaders", ())):
        return True
    return is_upstream()


def is_upstream() -> bool:
    """Whether this is the thread in which an EchoLoader iterates the loader it wraps."""
    return threading.current_thread().name == THREAD_NAME


def _count_ready(batches: Any) -> int:
    """Batches that workers have made and nobody has taken, -1 where that cannot be seen."""
    queue = getattr(batches, "_data_queue", None)
    if queue is None:
        return -1
    try:
        arrived = queue.qsize()
    except (NotImplementedError, OSError):
        return -1
    waiting = getattr(batches, "_task_info", {})
    return int(arrived) + sum(len(info) == 2 for info in waiting.values())
