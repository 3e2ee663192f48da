"""Random numbers of a batch: the same whatever the number of blocks, their staleness and their speed.

Batch n enters the first block with a generator state made from (seed, n). A block starts from the state that came
with the batch and sends on the state it left; a recompute starts where the forward did. Covered are torch's
generators of the CPU and of the current accelerator; Python's and NumPy's are not.
"""

import hashlib
from contextlib import AbstractContextManager
from types import TracebackType

import torch

RngState = tuple[torch.Tensor, ...]
"""The state of the CPU's generator, and of the accelerator's from the first block on that uses one."""


class batch_rng(AbstractContextManager[None]):  # noqa: N801  (used like torch.no_grad, and called like manual_seed)
    """Set torch's generators to the state in which batch `n` enters a split model's first block.

    In a plain training loop before each batch, `batch_rng(seed, n)` makes dropout and other random layers draw what
    they draw in `ScheduleDSP(..., seed=seed)` and `simulate`, so that both train alike bit for bit at m = 0. As a
    context manager it also puts the states back that it found.
    """

    def __init__(self, seed: int, n: int) -> None:
        self._found = get_state()
        digest = hashlib.blake2b(f"{seed} {n}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little", signed=True)
        # On its own where there is nothing else to seed: torch.manual_seed takes a hundred times as long.
        (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_state(self._found)


def get_state(before: RngState = ()) -> RngState:
    """The present state of torch's generators; that of an accelerator which is not used here as it was `before`."""
    if _accelerator_is_used():
        return torch.get_rng_state(), torch.get_device_module().get_rng_state()
    return torch.get_rng_state(), *before[1:]


def set_state(state: RngState) -> None:
    """Put torch's generators into `state`; an accelerator's as `batch_rng` does if no block has used one yet."""
    torch.set_rng_state(state[0])
    if _accelerator_is_used():
        if len(state) > 1:
            torch.get_device_module().set_rng_state(state[1])
        else:
            torch.get_device_module().manual_seed(torch.initial_seed())


def _accelerator_is_used() -> bool:
    return torch.accelerator.is_available() and torch.get_device_module().is_initialized()
