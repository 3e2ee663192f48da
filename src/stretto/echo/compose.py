"""The members of a transform's Compose, where calling them in order equals calling the Compose.

The libraries are told apart by what their objects have, so none is imported. In doubt a Compose stays whole.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Part:
    """A transform's member under the name of its class or function."""

    name: str
    function: Callable[..., Any]
    by_keyword: bool = False
    """Takes and returns named values (albumentations) and not positional ones."""


def take_apart(transform: Any) -> list[Part]:
    """The members to call in order, or the transform itself as the only part."""
    if is_albumentations(transform):
        if is_plain_albumentations(transform) and transform.main_compose:
            return _albumentations_parts(transform, [])
        return [Part(name_of(transform), transform)]
    return _positional_parts(transform)


def name_of(function: Any) -> str:
    """The name of a function, of what a partial calls, or of an object's class."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name: str = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name


def _positional_parts(transform: Any) -> list[Part]:
    if is_plain_monai(transform):
        # Its own way to run one member keeps map_items, log_stats and the errors as they are.
        return [
            Part(name_of(member), functools.partial(transform, start=at, end=at + 1))
            for at, member in enumerate(transform.transforms)
        ]
    if is_loop(transform):
        members = transform if isinstance(transform, nn.Sequential) else transform.transforms
        return [part for member in members for part in _positional_parts(member)]
    return [Part(name_of(transform), transform)]


def is_loop(transform: Any) -> bool:
    """Whether calling it passes the example through its members and does nothing else."""
    if isinstance(transform, nn.Module):
        hooks = (transform._forward_hooks, transform._forward_pre_hooks, transform._backward_hooks)
        if any(hooks) or type(transform).__call__ is not nn.Module.__call__:
            return False
        if type(transform) is nn.Sequential:
            return len(transform) > 0
    if not _has_members(transform):
        return False
    owner, code = _code(transform, "forward" if isinstance(transform, nn.Module) else "__call__")
    return (
        owner == "Compose"
        and code is not None
        and set(code.co_names) <= {"transforms", "len"}
        and not any(isinstance(const, CodeType) for const in code.co_consts)
    )


def is_plain_monai(transform: Any) -> bool:
    """Whether it is MONAI's Compose with nothing but members to call."""
    if not (_has_members(transform) and hasattr(transform, "map_items") and _code(transform)[0] == "Compose"):
        return False
    if not {"start", "end"} <= inspect.signature(type(transform).__call__).parameters.keys():
        return False
    return getattr(transform, "lazy", None) is False and getattr(transform, "unpack_items", None) is False


def is_albumentations(transform: Any) -> bool:
    """Whether it is one of Albumentations' compositions."""
    return all(hasattr(transform, name) for name in ("transforms", "py_random", "random_generator", "p"))


_ALBUMENTATIONS_SETTINGS = {
    *("transforms", "p", "replay_mode", "processors", "mask_interpolation", "seed", "save_applied_params"),
    *("random_generator", "py_random", "main_compose", "check_each_transform", "is_check_args", "is_check_shapes"),
    *("_additional_targets", "_available_keys", "_strict", "_images_was_list", "_masks_was_list"),
}


def is_plain_albumentations(compose: Any) -> bool:
    """Whether it is Albumentations' Compose with nothing but members to call and checks."""
    return (
        type(compose).__name__ == "Compose"
        and vars(compose).keys() <= _ALBUMENTATIONS_SETTINGS
        and hasattr(compose, "preprocess")
        and _has_members(compose)
        and compose.p >= 1
        and not (compose.processors or compose.save_applied_params or compose.replay_mode)
    )


def _albumentations_parts(compose: Any, checks: list[Callable[[dict[str, Any]], None]]) -> list[Part]:
    parts: list[Part] = []
    checks = [*checks, compose.preprocess]
    for member in compose.transforms:
        if is_albumentations(member) and is_plain_albumentations(member):
            parts += _albumentations_parts(member, checks)
        else:
            function = _Checked(checks, member) if checks else member
            parts.append(Part(name_of(member), function, by_keyword=True))
        checks = []
    return parts


class _Checked:
    """A Compose's first member, after what the Compose does to its input: checks, and stacking of lists."""

    def __init__(self, checks: list[Callable[[dict[str, Any]], None]], member: Callable[..., Any]) -> None:
        self._checks = checks
        self._member = member

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> Any:  # noqa: ARG002
        # A Compose whose p is 1 ignores force_apply and does not pass it on.
        for check in self._checks:
            check(data)
        return self._member(*args, **data)

    def __repr__(self) -> str:
        return repr(self._member)


def _has_members(transform: Any) -> bool:
    members = getattr(transform, "transforms", None)
    return isinstance(members, list | tuple) and len(members) > 0 and all(callable(member) for member in members)


def _code(transform: Any, method: str = "__call__") -> tuple[str, CodeType | None]:
    """The name of the class that defines the method, and the method's code."""
    for owner in type(transform).__mro__:
        if method in vars(owner):
            return owner.__name__, getattr(vars(owner)[method], "__code__", None)
    return "", None
