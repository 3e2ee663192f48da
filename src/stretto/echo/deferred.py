"""The result of a transform that has been put off: what `StagedDataset.wrap` shows a data set's `__getitem__`.

A StandIn takes the transform's place. Called, it records the Call and returns a Deferred, which may be passed
on, indexed and returned. Whatever would need its value raises CannotTakeApart, so nothing is wrong in silence.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils import _pytree as pytree

calls_made: ContextVar[list["Call"] | None] = ContextVar("calls made by the running __getitem__", default=None)


class CannotTakeApart(TypeError):  # noqa: N818
    """A data set that does more with its transform than to call it and return the result."""

    @classmethod
    def because(cls, owner: str, what: str) -> "CannotTakeApart":
        """The error for the class `owner` whose `__getitem__` does `what`."""
        return cls(
            f"StagedDataset.wrap cannot take {owner} apart: its __getitem__ {what}. wrap runs the transform later, "
            "in stages of its own. Name the stages yourself: StagedDataset(source, name=function, ...)"
        )


@dataclass(eq=False)
class Call:
    """A call that is put off, as the arguments for the transform's next part; at its end `args` is (result,)."""

    owner: str
    slot: str
    """The attribute that was called: "transform", say."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_args: int
    lists: tuple[str, ...]
    """Named values that albumentations' Compose stacks and gives back as lists."""

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """This call, with other arguments."""
        return Call(self.owner, self.slot, args, kwargs, self.num_args, self.lists)

    def refusal(self, what: str) -> CannotTakeApart:
        """The error for a use of the result, which stands for * in `what`."""
        return CannotTakeApart.because(self.owner, what.replace("*", f"the result of self.{self.slot}"))


class Deferred:
    """The result of a call that is put off, or an item of it."""

    __slots__ = ("call", "path")
    call: Call
    path: tuple[Any, ...]

    def __init__(self, call: Call, path: tuple[Any, ...] = ()) -> None:
        object.__setattr__(self, "call", call)
        object.__setattr__(self, "path", path)

    def __getitem__(self, key: Any) -> "Deferred":
        return Deferred(self.call, (*self.path, key))

    def __iter__(self) -> Iterator["Deferred"]:
        # `img, target = self.transforms(img, target)`: a joint transform returns as many values as it takes.
        if self.path or self.call.num_args < 2:
            raise self.call.refusal("takes the items of * one by one")
        return iter([self[at] for at in range(self.call.num_args)])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols ask for these to learn that there are none
        raise self.call.refusal(f"uses .{name} of *")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        deferred = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
        raise deferred.call.refusal(f"passes * to torch's {getattr(function, '__name__', function)}")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Else `if isinstance(img, torch.Tensor)` would take the wrong branch in silence.
        if calls_made.get() is not None:
            raise self.call.refusal("asks for the type of *")
        return Deferred


class StandIn:
    """Stands where a data set's transform stood and puts off its calls."""

    def __init__(self, owner: str, slot: str, stands_for: type) -> None:
        self._owner = owner
        self._slot = slot
        self._stands_for = stands_for

    def __reduce__(self) -> tuple[Any, ...]:
        return StandIn, (self._owner, self._slot, self._stands_for)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._stands_for  # data sets may check that their transform is a Compose

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise CannotTakeApart.because(self._owner, f"uses self.{self._slot}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Deferred:
        """Record the call."""
        lists = tuple(key for key in ("images", "masks") if isinstance(kwargs.get(key), list | tuple))
        call = Call(self._owner, self._slot, args, kwargs, len(args), lists)
        calls = calls_made.get()
        if calls is None:
            raise CannotTakeApart.because(self._owner, f"is not what calls self.{self._slot}")
        for value in (*args, *kwargs.values()):
            for leaf in pytree.tree_leaves(value) if type(value) in (dict, list, tuple, Deferred) else ():
                if type(leaf) is Deferred:
                    raise leaf.call.refusal(f"passes * to self.{self._slot}")
        calls.append(call)
        return Deferred(call)


_NEED_THE_VALUE = {
    "sets an attribute of *": "__setattr__ __delattr__",
    "sets an item of *": "__setitem__ __delitem__",
    "asks for the length or the items of *": "__len__ __contains__ __reversed__",
    "compares or tests *": "__bool__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__",
    "calculates with *": "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __matmul__ __rmatmul__ __truediv__ "
    "__rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ __and__ "
    "__rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__ __neg__ __pos__ "
    "__abs__ __invert__ __round__",
    "converts *": "__str__ __format__ __int__ __float__ __complex__ __index__ __bytes__ __array__",
    "calls *": "__call__",
    "enters *": "__enter__",
    "copies or pickles *": "__reduce_ex__",
}


def _raising(what: str) -> Callable[..., NoReturn]:
    def method(self: Deferred, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG001
        raise self.call.refusal(what)

    return method


for _what, _names in _NEED_THE_VALUE.items():
    for _name in _names.split():
        setattr(Deferred, _name, _raising(_what))
