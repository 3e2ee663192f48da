"""Running a data set's transform after its `__getitem__`, part by part.

    Read      __getitem__ on a copy of the data set whose transform is a StandIn; what it returns holds Deferreds
    Pending   that example with holes for the results, and the calls that were put off
    RunPart   runs one part of the transform on every call; the last stage fills the holes

Nothing is changed in place: an example after any stage can be kept and taken on several times.
"""

import contextlib
import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.data import Subset

from stretto.echo.compose import Part, take_apart
from stretto.echo.deferred import Call, CannotTakeApart, Deferred, StandIn, calls_made
from stretto.tree import Structure, clone, flatten


def stages_of(dataset: Any) -> dict[str, Callable[[Any], Any]]:
    """See `StagedDataset.wrap`: the stages from an index to an example."""
    copies: list[_Copy] = []
    shadow, transforms = _with_stand_ins(dataset, copies)
    steps: list[RunPart] = []
    for slot, transform in transforms.items():
        # A target's transform is a step or two, and cheap: not worth a choice of where to echo.
        parts = [Part(slot, transform)] if slot == "target_transform" else take_apart(transform)
        steps += [RunPart(slot, part, starts=part is parts[0], ends=part is parts[-1]) for part in parts]
    stages: dict[str, Callable[[Any], Any]] = {"read": Read(shadow, copies)}
    for step in steps:
        step.fills = step is steps[-1]
        stages[unique_name(step.part.name, stages)] = step
    return stages


@dataclass(eq=False)
class _Copy:
    """A shallow copy of a data set that follows the original: its `set_epoch` or `open` reach that one."""

    original: Any
    copy: Any
    own: Container[str]
    """Attributes in which the copy differs."""

    def __post_init__(self) -> None:
        self._seen = dict(getattr(self.original, "__dict__", {}))

    def follow(self) -> None:
        """Take over what has changed in the original."""
        for name, value in getattr(self.original, "__dict__", {}).items():
            if self._seen.get(name, self) is not value:
                self._seen[name] = value
                if name not in self.own:
                    setattr(self.copy, name, value)


class Indices:
    """The source of a wrapped data set: `indices[i] == i`, as many as the data set has."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        return index


class Read:
    """Stage "read": the data set's `__getitem__`, with its transforms put off."""

    def __init__(self, dataset: Any, copies: list["_Copy"]) -> None:
        self._dataset = dataset
        self._copies = copies

    def __call__(self, index: int) -> Any:
        """What the data set returns for `index`, as a Pending if it called a transform."""
        for made in self._copies:
            made.follow()
        calls: list[Call] = []
        token = calls_made.set(calls)
        try:
            example = self._dataset[index]
        except CannotTakeApart:
            raise
        except Exception as error:
            if calls:
                error.add_note(
                    f"StagedDataset.wrap had put off self.{calls[-1].slot}; if the rest of __getitem__ needs its "
                    "result, name the stages yourself: StagedDataset(source, name=function, ...)"
                )
            raise
        finally:
            calls_made.reset(token)
        return Pending.of(example, calls) if calls else example

    def __repr__(self) -> str:
        return f"{type(self._dataset).__name__}.__getitem__"


@dataclass(eq=False)
class Pending:
    """An example whose transforms have not run, or not to their end."""

    leaves: list[Any]
    structure: Structure
    holes: list[tuple[int, int, tuple[Any, ...]]]
    """(leaf, call, path): where the result of which call goes, or the item of it at the path."""
    calls: list[Call]

    def __reduce__(self) -> tuple[Any, ...]:
        # A structure can be pickled with a warning of torch's only.
        return _pending, (self.structure.build(self.leaves), self.holes, self.calls)

    @staticmethod
    def of(example: Any, calls: list[Call]) -> "Pending":
        """Find the Deferreds in what `__getitem__` returned."""
        numbers = {id(call): number for number, call in enumerate(calls)}
        leaves, structure = _flatten(example)
        holes = []
        for at, leaf in enumerate(leaves):
            if type(leaf) is Deferred:
                if id(leaf.call) not in numbers:
                    raise leaf.call.refusal("returns * from an earlier call")
                holes.append((at, numbers[id(leaf.call)], leaf.path))
                leaves[at] = None
        used = {number for _, number, _ in holes}
        for number, call in enumerate(calls):
            if number not in used:
                raise call.refusal("drops *, or returns it in an object that is no list, tuple or mapping")
        return Pending(leaves, structure, holes, calls)

    def clone(self) -> "Pending":
        """A copy that shares no memory."""
        calls = [call.given(clone(call.args), clone(call.kwargs)) for call in self.calls]
        return Pending(clone(self.leaves), self.structure, self.holes, calls)

    def fill(self) -> Any:
        """The example with the results in place."""
        leaves = [*self.leaves]
        for at, number, path in self.holes:
            (result,) = self.calls[number].args
            for key in path:
                result = result[key]
            leaves[at] = result
        return self.structure.build(leaves)


def _pending(example: Any, holes: list[Any], calls: list[Call]) -> Pending:
    return Pending(*_flatten(example), holes, calls)


@dataclass(eq=False)
class RunPart:
    """A stage: one part of the transform in `slot`, on every call of it."""

    slot: str
    part: Part
    starts: bool
    ends: bool
    fills: bool = False

    def __call__(self, example: Any) -> Any:
        """The example after this part."""
        if not isinstance(example, Pending):
            return example  # the data set did not call a transform for this one
        calls = [self._advance(call) if call.slot == self.slot else call for call in example.calls]
        pending = Pending(example.leaves, example.structure, example.holes, calls)
        return pending.fill() if self.fills else pending

    def __repr__(self) -> str:
        return repr(self.part.function)

    def _advance(self, call: Call) -> Call:
        if self.starts and not self.ends and not self.part.by_keyword and call.kwargs:
            # Which member takes which name is known to the Compose alone.
            raise CannotTakeApart.because(call.owner, f"passes {', '.join(call.kwargs)}= to a Compose")
        result = self.part.function(*call.args, **call.kwargs)
        if self.part.by_keyword:
            if not self.ends:
                return call.given((), result)
            result = {**result, **{key: list(result[key]) for key in call.lists}}
        if self.ends or call.num_args < 2:
            return call.given((result,), {})
        return call.given(tuple(result), {})


def _flatten(example: Any) -> tuple[list[Any], Structure]:
    """As tree.flatten, without the leaves' paths where that is possible: they are half of the time."""
    leaves, spec = pytree.tree_flatten(example)
    if any(isinstance(leaf, Mapping) for leaf in leaves):
        return flatten(example)
    return leaves, Structure(spec, mappings={}, paths=[])


def _with_stand_ins(dataset: Any, copies: list[_Copy]) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """A shallow copy of the data set with stand-ins, and the transforms they stand for, by attribute.

    The copies made are added to `copies`.
    """
    if isinstance(dataset, Subset) and not hasattr(dataset, "transform"):
        inner, transforms = _with_stand_ins(dataset.dataset, copies)
        shadow = copy.copy(dataset)
        shadow.dataset = inner
        copies.append(_Copy(dataset, shadow, {"dataset"}))
        return shadow, transforms
    owner = type(dataset).__name__
    values = {slot: getattr(dataset, slot, None) for slot in ("transform", "transforms", "target_transform")}
    transforms = {slot: value for slot, value in values.items() if callable(value)}
    new: dict[str, Any] = {slot: StandIn(owner, slot, _seen_class(value)) for slot, value in transforms.items()}
    parts = ("transform", "target_transform")
    joint = transforms.get("transforms")
    if joint is not None and all(getattr(joint, slot, dataset) is values[slot] for slot in parts):
        # torchvision's StandardTransform, which calls the other two.
        del transforms["transforms"]
        new["transforms"] = copy.copy(joint)
        for slot in parts:
            setattr(new["transforms"], slot, new.get(slot))
    shadow = copy.copy(dataset)
    for slot, value in new.items():
        with contextlib.suppress(AttributeError):
            setattr(shadow, slot, value)
        if getattr(shadow, slot) is not value:
            raise TypeError(
                f"StagedDataset.wrap cannot take {owner} apart: its .{slot} cannot be replaced. Name the stages "
                "yourself: StagedDataset(source, name=function, ...)"
            )
    copies.append(_Copy(dataset, shadow, set(new)))
    return shadow, transforms


def _seen_class(transform: Any) -> type:
    """What isinstance should see; the type of a function cannot be pickled."""
    return type(transform) if hasattr(transform, "transforms") else StandIn


def unique_name(name: str, taken: Container[str]) -> str:
    """The name, or with the first number from 2 on that makes it none of those taken: flip_2."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique
