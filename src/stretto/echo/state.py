"""States as plain containers, numbers and tensors, so that `torch.load(weights_only=True)` reads them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def to_plain(value: Any, path: str = "state") -> Any:
    """`value` with NumPy values as numbers and tensors, and tensors detached and on the CPU.

    Raises TypeError, naming the path, for what `torch.load(weights_only=True)` would refuse.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).cpu()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value))
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {to_plain(key, f"{path} key"): to_plain(inner, f"{path}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(to_plain(inner, f"{path}[{at}]") for at, inner in enumerate(value))
    if isinstance(value, list):
        return [to_plain(inner, f"{path}[{at}]") for at, inner in enumerate(value)]
    advice = "Use checkpoint_buffer=False" if "buffer" in path else "Turn it into tensors or numbers"
    raise TypeError(
        f"{path} is {value!r:.60}, a {type(value).__name__}: states hold containers, numbers, strings and "
        f"tensors only, as torch.load(weights_only=True) demands. {advice}"
    )


def check_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting differs between a state and the loader that is to load it."""
    for name, now in current.items():
        if (then := saved.get(name)) != now:
            raise ValueError(
                f"the state was saved with {name}={then!r}, this loader has {name}={now!r}: "
                "load it into a loader with the settings it was saved with"
            )
