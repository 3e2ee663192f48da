"""The random generators that functions hold, found by looking at what the functions refer to.

Searched: an object's attributes, a partial's and a bound method's parts, closures, lists, tuples and dicts of
at most 1000 items, and the module-level names a function uses, also through functions of its own module. So
`TRANSFORM = A.Compose(...)` next to `def augment(image): return TRANSFORM(image=image)` is found.

Libraries whose transforms have generators of their own (albumentations: one pair each, MONAI: one each) are
given one to share, through their `set_random_state`: to seed one is cheap, and to give all the same seed, as
albumentations' `set_random_seed` does, would make a horizontal and a vertical flip go together every time.
"""

import _random
import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_LARGE = 1000
MAX_DEPTH = 20
"""Of references that are followed."""
WITHOUT_PARTS = (
    type,
    ModuleType,
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    torch.Tensor,
    np.ndarray,
    np.generic,
)
"""Types that hold no generator."""
_seed_mersenne = _random.Random.seed
GLOBAL_GENERATORS = (random._inst, np.random.mtrand._rand, torch.default_generator)
"""The module-level generators of each library."""


class HeldGenerators:
    """The generators that `functions` hold, to be seeded together."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._seeders: list[Callable[[int], object]] = []
        self._seen: dict[int, Any] = {id(generator): generator for generator in GLOBAL_GENERATORS}
        for function in functions:
            self._visit(function, 0)
        self._seen.clear()

    def __len__(self) -> int:
        return len(self._seeders)

    def seed(self, key: int) -> None:
        """Seed each generator with its own function of the 64-bit `key`."""
        for seeder in self._seeders:
            key = (key * _MULTIPLIER + _INCREMENT) & _MASK
            seeder(key)

    def _visit(self, value: Any, depth: int) -> None:
        if value is None or isinstance(value, WITHOUT_PARTS) or id(value) in self._seen or depth > MAX_DEPTH:
            return
        self._seen[id(value)] = value  # kept, so that no other object gets its id
        seeder = seeder_of(value)
        if seeder is not None:
            self._seeders.append(seeder)
            return
        _share(value)
        for part in parts_of(value):
            self._visit(part, depth + 1)


# One for the whole process, so that two loaders over the same transforms seed what these draw from.
_SHARED_PAIR = (np.random.Generator(np.random.PCG64(0)), random.Random(0))
_SHARED_STATE = np.random.RandomState(0)


def _share(value: Any) -> None:
    """Have a transform of albumentations or MONAI draw from the shared generators, which are visited next."""
    if not hasattr(type(value), "set_random_state"):
        return
    if isinstance(getattr(value, "random_generator", None), np.random.Generator) and hasattr(value, "py_random"):
        value.set_random_state(*_SHARED_PAIR)
    elif isinstance(getattr(value, "R", None), np.random.RandomState):
        value.set_random_state(state=_SHARED_STATE)


# Of a generator with full period modulo 2**64: Steele and Vigna, arXiv 2001.05304.
_MULTIPLIER = 0xD1342543DE82EF95
_INCREMENT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def seeder_of(value: Any) -> Callable[[int], object] | None:
    """How to seed `value` with 64 bits, if it is a generator."""
    if type(value) is random.Random:
        return functools.partial(seed_random, value)
    if isinstance(value, random.Random):
        return value.seed
    if isinstance(value, torch.Generator):
        return value.manual_seed
    if isinstance(value, np.random.RandomState):
        return functools.partial(_seed_random_state, value)
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if type(value) is np.random.PCG64:
        return functools.partial(_seed_pcg64, value)
    if isinstance(value, np.random.BitGenerator):
        return functools.partial(_seed_bits, value)
    return None


def seed_random(generator: random.Random, key: int) -> None:
    """What `generator.seed(key)` does for an integer, at two thirds of the time."""
    _seed_mersenne(generator, key)
    vars(generator)["gauss_next"] = None


def _seed_random_state(generator: np.random.RandomState, key: int) -> None:
    try:
        generator.seed(key >> 32)
    except TypeError:  # over other bits than MT19937's
        fresh = np.random.RandomState(type(generator._bit_generator)(key))
        generator.set_state(fresh.get_state(legacy=False))


def _seed_pcg64(bits: Any, key: int) -> None:
    # A seed of its own would be hashed, in 20 us and not 3: the key is one already.
    state = {"state": key << 64 | key, "inc": _INCREMENT}
    bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}


def _seed_bits(bits: Any, key: int) -> None:
    bits.state = type(bits)(key).state


def parts_of(value: Any) -> Iterable[Any]:
    """What `value` refers to, in an order that is the same in every process."""
    if isinstance(value, dict):
        return value.values() if len(value) <= _LARGE else ()
    if isinstance(value, list | tuple):
        return value if len(value) <= _LARGE else ()
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, BuiltinFunctionType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        return ()
    methods = (getattr(type(value), name, None) for name in ("__call__", "forward", "__getitem__"))
    return [*_attributes(value), *methods]


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # still empty
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if not isinstance(value, FunctionType) or value.__module__ == function.__module__:
            yield value


def _names(code: CodeType) -> Iterator[str]:
    """The global names (and attributes) that the code and the functions inside it use."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
