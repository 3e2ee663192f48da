"""The arguments of `stretto.echo`, checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from stretto.echo.buffer import Bound
from stretto.echo.factor import Factor, check_factor

Unit = Literal["example", "batch"]


@dataclass(kw_only=True, slots=True)
class Settings:
    """See `stretto.echo`. Raises TypeError or ValueError for arguments that cannot work, naming the value."""

    factor: Factor
    unit: Unit
    buffer: int | str | None
    augment: Callable[[Any], Any] | None
    device: torch.device | str | None
    max_factor: int | None
    carry_over: bool
    updates_per_epoch: int | None
    checkpoint_buffer: bool
    seed: int
    copy: bool

    def __post_init__(self) -> None:
        self.factor = check_factor(self.factor)
        if self.unit not in ("example", "batch"):
            raise ValueError(f'unit={self.unit!r}: expected "example" or "batch"')
        Bound.parse(self.buffer)
        if self.augment is not None and not callable(self.augment):
            raise TypeError(f"augment={self.augment!r}: expected a function of a batch that returns a batch")
        if self.device is not None:
            self.device = _check_device(self.device)
        self.seed = check_int("seed", self.seed)
        for name in ("carry_over", "checkpoint_buffer", "copy"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: expected True or False")
        if self.max_factor is not None:
            self.max_factor = check_int("max_factor", self.max_factor, at_least=1)
            if self.factor != "auto":
                raise ValueError(
                    f"max_factor={self.max_factor} has no effect with factor={self.factor}: it is the bound of "
                    '"auto"'
                )
        if self.updates_per_epoch is not None:
            self.updates_per_epoch = check_int("updates_per_epoch", self.updates_per_epoch, at_least=1)
            if not self.carry_over:
                raise ValueError(
                    f"updates_per_epoch={self.updates_per_epoch} with carry_over=False: there an epoch is one "
                    "pass, whose length follows from the loader. Use carry_over=True"
                )

    def for_state(self, loader: Any, batch_size: int | None, samplers: list[str]) -> dict[str, Any]:
        """What a state and the loader that loads it must have in common."""
        rank, world_size = rank_and_world_size()
        return {
            "factor": self.factor,
            "unit": self.unit,
            "buffer": self.buffer,
            "max_factor": self.max_factor,
            "carry_over": self.carry_over,
            "updates_per_epoch": self.updates_per_epoch,
            "seed": self.seed,
            "batch_size": batch_size,
            "samplers": samplers,
            "len(loader)": loader_length(loader),
            "rank": rank,
            "world_size": world_size,
        }


def check_int(name: str, value: object, *, at_least: int | None = None) -> int:
    """Return `value` as an int. Raises TypeError or ValueError naming it."""
    expected = "expected an integer" + (f" >= {at_least}" if at_least is not None else "")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: {expected}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={value}: {expected}")
    return int(value)


def _check_device(device: torch.device | str) -> torch.device:
    expected = 'expected a torch.device that this torch can use, or its name, such as "cuda:0"'
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={device!r}: {expected} ({str(error).splitlines()[0]})") from None
    return checked


def loader_length(loader: Any) -> int | None:
    """len(loader), or None where it has none: a `__len__` may raise anything to say so."""
    try:
        return len(loader)
    except Exception:
        return None


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
