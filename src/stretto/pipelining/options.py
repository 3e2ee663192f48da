"""The settings that `simulate` and `ScheduleDSP` share, checked."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from stretto.pipelining.repairs import Repairs
from stretto.pipelining.spec import Staleness

LossFn = Callable[..., torch.Tensor]
Clip = float | Callable[[Iterable[torch.nn.Parameter]], Any]
Autocast = torch.dtype | torch.autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How every block trains. Raises ValueError or TypeError for a value that cannot be meant."""

    spec: Staleness
    loss_fn: LossFn | None = None
    accumulate: int = 1
    clip: Clip | None = None
    autocast: Autocast | None = None
    repairs: Repairs = field(default_factory=Repairs)
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate!r}: expected a number of micro-batches from 1")
        if self.clip is not None and not callable(self.clip):
            is_number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
            if not is_number or not self.clip > 0:
                raise ValueError(f"clip={self.clip!r}: expected a norm above 0, or a function of the parameters")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed={self.seed!r}: expected a whole number")
        if isinstance(self.autocast, torch.dtype):
            if self.autocast not in (torch.bfloat16, torch.float16):
                raise ValueError(f"autocast={self.autocast}: expected torch.bfloat16 (or a torch.autocast)")
        elif self.autocast is not None and not isinstance(self.autocast, torch.autocast):
            raise TypeError(f"autocast={self.autocast!r}: expected torch.bfloat16 or a torch.autocast")
        if self._autocast_dtype() == torch.float16:
            raise ValueError(
                "autocast to torch.float16 needs a scaled loss, which the blocks of a pipeline do not share: "
                "use torch.bfloat16"
            )
        if not isinstance(self.repairs, Repairs):
            raise TypeError(f"repairs={self.repairs!r}: expected a Repairs, such as Repairs(predict=True)")
        if isinstance(self.loss_fn, type):
            raise TypeError(
                f"loss_fn={self.loss_fn.__name__}: expected a function, such as {self.loss_fn.__name__}()"
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(f"loss_fn={self.loss_fn!r}: expected a function of (output, target), or None")

    def shared(self) -> dict[str, Any]:
        """What must be the same in all processes of a pipeline."""
        return {
            "staleness": str(self.spec),
            "accumulate": self.accumulate,
            "repairs": str(self.repairs),
            "seed": self.seed,
        }

    def _autocast_dtype(self) -> torch.dtype | None:
        if isinstance(self.autocast, torch.autocast):
            return self.autocast.fast_dtype if self.autocast._enabled else None
        return self.autocast

    def autocasting(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward, a recompute or the loss on `device`."""
        # Weights cast in an earlier pass are older than this one.
        torch.clear_autocast_cache()
        if isinstance(self.autocast, torch.dtype):
            return torch.autocast(device.type, dtype=self.autocast)
        return self.autocast or nullcontext()

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of the last block's output.

        Raises ValueError if the loss function needs a target and there is none, TypeError if it gives no scalar.
        """
        if self.loss_fn is None:
            loss = output
        elif target is not None and accepts(self.loss_fn, 2):
            loss = self.loss_fn(output, target)
        elif accepts(self.loss_fn, 1):
            loss = self.loss_fn(output)
        else:
            raise ValueError(
                f"target=None, but loss_fn={self.loss_fn!r} needs one: call step(x, target=y) on block 0"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:60]
            source = "the last block (loss_fn=None)" if self.loss_fn is None else f"loss_fn={self.loss_fn!r}"
            raise TypeError(f"{source} gave {what} as the loss: expected a tensor with one element")
        return loss


def accepts(function: Callable[..., Any], num_arguments: int) -> bool:
    """Whether `function`, or the forward of a module, can be called with that many positional arguments."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        inspect.signature(called).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # built in, without a signature
        return True
    return True
