"""Timing the parts of a data set that knows nothing of it: its transform's members, or its named stages.

    find_members    where the callables are that make an example: (container, key, callable), and the stages' names
    Swap            puts a TimedMember in the place of each, and the originals back
    StageClock      splits the time of a batch among the stages: what runs gets the time since the last switch

So the time of a stage never counts in another one, and "read" is what is left of `__getitem__`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset

from stretto.echo import compose
from stretto.echo.stages import StagedDataset
from stretto.echo.workers.parts import Echoed
from stretto.echo.wrap import unique_name

READ, COLLATE = "read", "collate"
_SLOTS = ("transform", "transforms", "target_transform")


class StageClock:
    """Wall and CPU seconds of each stage of one batch, in the thread that makes it."""

    __slots__ = ("cpu_s", "current", "last", "last_cpu", "look", "num_switches", "thread", "wall_s")

    def __init__(self) -> None:
        self.look: Callable[[int, Any, Any], None] | None = None
        """Called after each member with its stage, what it got and its result; its time counts nowhere."""
        self.thread = self.current = self.num_switches = 0
        self.last = self.last_cpu = 0.0
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def begin(self, num_stages: int) -> None:
        """Start a batch in stage 0."""
        self.thread = get_ident()
        self.wall_s = [0.0] * num_stages
        self.cpu_s = [0.0] * num_stages
        self.current = self.num_switches = 0
        self.resume()

    def switch(self, stage: int) -> int:
        """Go on with another stage; returns the one until now."""
        wall, cpu = time.perf_counter(), time.process_time()
        before = self.current
        self.wall_s[before] += wall - self.last
        self.cpu_s[before] += cpu - self.last_cpu
        self.last, self.last_cpu = wall, cpu
        self.current = stage
        self.num_switches += 1
        return before

    def end(self) -> None:
        """End the batch: members that the script kept are not timed any more."""
        self.switch(self.current)
        self.thread = 0

    def resume(self) -> None:
        """Leave out the time since the last switch."""
        self.last, self.last_cpu = time.perf_counter(), time.process_time()


_measured_switch_s: list[float] = []


def switch_s() -> float:
    """Seconds that a switch of stages takes here, with its share of a call, measured once in a process."""
    if not _measured_switch_s:
        clock = StageClock()
        clock.begin(1)
        start = time.perf_counter()
        for _ in range(50):
            clock.switch(0)
        _measured_switch_s.append(1.5 * (time.perf_counter() - start) / 50)
    return _measured_switch_s[0]


class TimedMember:
    """Calls `function`, timed, and looks like it otherwise: class, attributes, pickle and copy, tracebacks."""

    __slots__ = ("_clock", "_function", "_stage")

    def __init__(self, function: Any, stage: int, clock: StageClock) -> None:
        set_own = object.__setattr__
        set_own(self, "_function", function)
        set_own(self, "_stage", stage)
        set_own(self, "_clock", clock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns or raises."""
        clock: StageClock = self._clock
        # In threads of the data set's own the time would count twice.
        is_timed = clock.thread == get_ident() and self._stage < len(clock.wall_s)
        if is_timed:
            before = clock.switch(self._stage)
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            if error.__traceback__ is not None:  # the bare raise does not add this frame again
                error.__traceback__ = error.__traceback__.tb_next
            raise
        finally:
            if is_timed:
                clock.switch(before)
        if is_timed and clock.look is not None:
            clock.look(self._stage, args[0] if len(args) == 1 else [*args, *kwargs.values()], result)
            clock.resume()
        return result

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._function, name)

    def __repr__(self) -> str:
        return repr(self._function)

    def __eq__(self, other: object) -> bool:
        return bool(self._function == (other._function if type(other) is type(self) else other))

    def __hash__(self) -> int:
        return hash(self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._function,)


def _same(function: Any) -> Any:
    return function


_classes: dict[type, type[TimedMember]] = {}
_PLAIN = {*dir(object), *dir(TimedMember), *dir(lambda: None)}


def _timed(function: Any, stage: int, clock: StageClock) -> TimedMember:
    """A TimedMember with the special methods of the function's class, such as `__getitem__`: they need a class."""
    kind = type(function)
    if kind not in _classes:
        names = [name for name in dir(kind) if name.startswith("__") and callable(getattr(kind, name, None))]
        special = {name: _forward(name) for name in names if name not in _PLAIN}
        _classes[kind] = type("TimedMember", (TimedMember,), {**special, "__slots__": ()})
    return _classes[kind](function, stage, clock)


def _forward(name: str) -> Callable[..., Any]:
    def special(self: TimedMember, *args: Any) -> Any:
        return getattr(self._function, name)(*args)

    return special


@dataclass(frozen=True, slots=True)
class Place:
    """Where a callable is: `container[key] is function`."""

    container: Any
    key: Any
    function: Any
    stage: int


@dataclass(slots=True)
class Members:
    """The stages that make a batch, "read" first and "collate" last, and where those between are called from."""

    names: tuple[str, ...]
    places: list[Place]


def find_members(dataset: Any) -> Members:
    """Look for the stages of a data set. Several may share a name, such as in the parts of a ConcatDataset."""
    search = _Search()
    search.visit(dataset, {READ, COLLATE})
    return Members((*search.names, COLLATE), search.places)


class _Search:
    def __init__(self) -> None:
        self.names = [READ]
        self.places: list[Place] = []
        self._seen: set[int] = set()
        self._places_seen: set[tuple[int, Any]] = set()

    def visit(self, dataset: Any, taken: set[str]) -> None:
        """Add the stages of `dataset`, whose names are to differ from those `taken`."""
        if dataset is None or isinstance(dataset, list | tuple | dict) or id(dataset) in self._seen:
            return
        self._seen.add(id(dataset))
        if isinstance(dataset, Echoed):
            parts = dataset.parts
            self.visit(parts.source, taken)
            self._add_stages(parts.before._stages, taken)
            self._add_stages(parts.after._stages, taken)
            return
        if isinstance(dataset, StagedDataset):
            self.visit(dataset.source, taken)
            self._add_stages(dataset._stages._stages, taken)
            return
        if isinstance(dataset, ConcatDataset):
            outer = set(taken)
            for part in dataset.datasets:
                names = set(outer)
                self.visit(part, names)
                taken |= names
            return
        self.visit(getattr(dataset, "__dict__", {}).get("dataset"), taken)  # a Subset, and others like it
        self._add_transforms(dataset, taken)

    def _add_stages(self, stages: dict[str, Any], taken: set[str]) -> None:
        for at, (name, function) in enumerate(stages.items()):
            if at or name != READ:  # the time of "read" is what the others leave
                self._add(stages, name, function, name, taken)

    def _add_transforms(self, dataset: Any, taken: set[str]) -> None:
        attributes = getattr(dataset, "__dict__", {})
        values = {slot: getattr(dataset, slot, None) for slot in _SLOTS}
        joint = values["transforms"]
        # torchvision's StandardTransform, which calls the other two, has no part of its own.
        is_standard = joint is not None and all(
            getattr(joint, slot, dataset) is values[slot] for slot in ("transform", "target_transform")
        )
        for slot, value in values.items():
            if not callable(value) or (slot == "transforms" and is_standard):
                continue
            owners = [vars(joint), attributes] if is_standard else [attributes]
            whole = slot == "target_transform"
            for container, key, function in (
                [(owners[0], slot, value)] if whole else _leaves(value, owners[0], slot)
            ):
                name = slot if whole else compose.name_of(function)
                stage = self._add(container, key, function, name, taken)
                if function is value and is_standard and stage is not None:
                    self._add(attributes, slot, function, name, taken, stage)

    def _add(
        self, container: Any, key: Any, function: Any, name: str, taken: set[str], stage: int | None = None
    ) -> int | None:
        where = id(container.owner if isinstance(container, _Tuple) else container), key
        is_there = key in container if isinstance(container, dict) else True
        if where in self._places_seen or not is_there or container[key] is not function:
            return None
        self._places_seen.add(where)
        if stage is None:
            name = unique_name(name, taken)
            taken.add(name)
            if name not in self.names:
                self.names.append(name)
            stage = self.names.index(name)
        self.places.append(Place(container, key, function, stage))
        return stage


def _leaves(function: Any, container: Any, key: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The callables that `function` is taken apart into, as `take_apart` does, and where each is."""
    if compose.is_albumentations(function):
        is_split = compose.is_plain_albumentations(function) and function.main_compose
    else:
        is_split = compose.is_plain_monai(function) or compose.is_loop(function)
    if is_split:
        yield from _members_of(function)
    else:
        yield container, key, function


def _members_of(function: Any) -> Iterator[tuple[Any, Any, Any]]:
    if type(function) is nn.Sequential:
        container: Any = function._modules
        members = list(container.items())
    else:
        container = function.transforms
        members = list(enumerate(container))
        if isinstance(container, tuple):
            container = _Tuple(vars(function))
    for key, member in members:
        if compose.is_plain_monai(function):
            yield container, key, member
        elif compose.is_albumentations(function) and compose.is_albumentations(member):
            if compose.is_plain_albumentations(member):
                yield from _members_of(member)
            else:
                yield container, key, member
        else:
            yield from _leaves(member, container, key)


class _Tuple:
    """The tuple of a Compose's members, with items that can be set."""

    def __init__(self, owner: dict[str, Any]) -> None:
        self.owner = owner

    def __getitem__(self, key: int) -> Any:
        return self.owner["transforms"][key]

    def __setitem__(self, key: int, value: Any) -> None:
        members = list(self.owner["transforms"])
        members[key] = value
        self.owner["transforms"] = tuple(members)


_swapping = threading.Lock()
_swapped: list[tuple[Place, TimedMember]] = []


def swap_in(members: Members, clock: StageClock) -> bool:
    """Put timed callables in place; False, and nothing done, while another fetch of this process has done so."""
    if not _swapping.acquire(blocking=False):
        return False
    try:
        for place in members.places:
            member = _timed(place.function, place.stage, clock)
            _swapped.append((place, member))
            place.container[place.key] = member
    except Exception:  # a container of the script's that does not like to be changed
        put_back()
        return False
    return True


def put_back() -> None:
    """Undo `swap_in`. What was put there meanwhile stays."""
    _undo()
    if _swapping.locked():  # it is not in a process that the data set itself forked
        _swapping.release()


def _undo() -> None:
    while _swapped:
        place, member = _swapped[-1]
        try:
            if place.container[place.key] is member:
                place.container[place.key] = place.function
        except (KeyError, IndexError):
            pass  # the script took it out
        _swapped.pop()


def _after_fork() -> None:
    """In a process forked while another thread made a batch: that thread is not there to put things back."""
    global _swapping  # noqa: PLW0603
    _undo()
    _swapping = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
