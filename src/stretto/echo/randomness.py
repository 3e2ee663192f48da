"""The random state of each use of an example, as a function of integers such as (seed, epoch, position, use).

torch's, NumPy's and Python's global states are saved once for a batch and restored at its end (0.14 ms, most of
it NumPy's), and seeded for each example (13 us; 8 more with albumentations' transforms, 3 with MONAI's).
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stretto.echo.generators import HeldGenerators, seed_random
from stretto.echo.keyed import derive_key


class KeyedRandomness:
    """Random numbers for `functions` that depend on nothing but the words given to `seed`.

        randomness = KeyedRandomness(*dataset.stages.values())
        with randomness:                                        # a batch
            for index in indices:
                randomness.seed(seed, epoch, position, use)
                ...

    Besides the global states it seeds the generators that the functions hold: see generators.py, which looks for
    them at the first use in each process. Those are not restored: albumentations' and MONAI's transforms
    keep the generator that they share, where the last use left it.

    Generators on other devices than the CPU are left alone: in workers there are none.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._functions = functions
        self._held: HeldGenerators | None = None
        self._saved: list[tuple[Any, Any, Any]] = []
        self._first: KeyedRandomness | None = None

    def beside(self, *functions: Callable[..., Any]) -> "KeyedRandomness":
        """The same for other functions, to be seeded within `with self`: not what only these here hold."""
        other = KeyedRandomness(*functions)
        other._saved, other._first = self._saved, self
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return (KeyedRandomness if self._first is None else self._first.beside), self._functions

    def __enter__(self) -> "KeyedRandomness":
        self._saved.append((torch.default_generator.get_state(), np.random.get_state(), random.getstate()))
        return self

    def __exit__(self, *exc_info: object) -> None:
        of_torch, of_numpy, of_python = self._saved.pop()
        torch.default_generator.set_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    def seed(self, *words: int, key: int = 0) -> None:
        """Set all generators to the state that follows from `words`, each to its own; `key` as for `derive_key`."""
        assert self._saved, "seed() outside of `with`"
        held = self.held()
        key = derive_key(*words, key=key)
        # From 64 bits torch's generator and NumPy's take 32 each, and equal ones would make equal numbers.
        torch.default_generator.manual_seed(key)
        np.random.seed(key >> 32)
        seed_random(random._inst, key)
        held.seed(key)

    def held(self) -> HeldGenerators:
        """The generators that the functions hold, looked for once."""
        if self._held is None:
            self._held = HeldGenerators(self._functions)
        return self._held
