"""States as plain containers, numbers and tensors, so that `torch.load(weights_only=True)` reads them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

PLAIN = (int, float, complex, bool, str, bytes, type(None))
"""Types of values that stay as they are."""


def to_plain(value: Any, path: str = "state", advice: str = "Turn it into tensors or numbers") -> Any:
    """`value` with NumPy values as numbers and tensors, and tensors detached and on the CPU.

    Raises TypeError, naming the path and ending in `advice`, for what `torch.load(weights_only=True)` would refuse.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).cpu()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value))
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.item()
    if type(value) in PLAIN or type(value) is Counter:
        return value
    if isinstance(value, Mapping):
        return {
            to_plain(key, f"{path} key", advice): to_plain(inner, f"{path}[{key!r}]", advice)
            for key, inner in value.items()
        }
    if isinstance(value, tuple):
        return tuple(to_plain(inner, f"{path}[{at}]", advice) for at, inner in enumerate(value))
    if isinstance(value, list):
        return [to_plain(inner, f"{path}[{at}]", advice) for at, inner in enumerate(value)]
    raise TypeError(
        f"{path} is {value!r:.60}, a {type(value).__name__}: states hold containers, numbers, strings and "
        f"tensors only, as torch.load(weights_only=True) demands. {advice}"
    )


def check_settings(saved: Mapping[str, Any], current: Mapping[str, Any], owner: str = "loader") -> None:
    """Raise ValueError if a setting differs between a state and the `owner` that is to load it."""
    for name, now in current.items():
        if (then := saved.get(name)) != now:
            raise ValueError(
                f"the state was saved with {name}={then!r}, this {owner} has {name}={now!r}: "
                f"load it into a {owner} with the settings it was saved with"
            )
