"""What repairs the accuracy of stale training: a gentler rate, a warm-up, predicted weights. All off by default.

Learning rate times staleness is what breaks training, mostly early. What helps most is not here: the default
m_k = K-1-k, Nesterov momentum, and accumulation (m counts micro-batches: a group of A divides the staleness by A).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

_WITH_TWO_MOMENTS = (Adam, AdamW, NAdam)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """Changes to each block's update, by its own staleness of m_k / A updates.

    Raises ValueError for a value out of range.
    """

    predict: bool = False
    """Run a stale block's forward on the weights that its optimizer's momentum predicts for the batch's backward,
    w - (m_k / A) * lr * momentum (SpecTrain, arXiv 1809.02839). SGD with momentum, Adam, AdamW and NAdam."""
    discount: float = 0.0
    """Multiply a block's learning rate by (1 + m_k / A) ** -discount (PipeMare's first technique,
    arXiv 1910.05124)."""
    discount_updates: int | None = None
    """Let the exponent fall linearly to 0 over this many updates, as PipeMare does. None keeps it."""
    warmup: int = 0
    """Let the learning rate of all blocks rise linearly from 0 over this many updates."""

    def __post_init__(self) -> None:
        if not isinstance(self.predict, bool):
            raise TypeError(f"predict={self.predict!r}: expected True or False")
        if not 0 <= self.discount < math.inf:
            raise ValueError(f"discount={self.discount}: expected an exponent from 0 (off) to about 1")
        if self.discount_updates is not None and (self.discount_updates < 1 or self.discount == 0):
            raise ValueError(
                f"discount_updates={self.discount_updates} with discount={self.discount}: expected a number of "
                "updates from 1, over which a discount above 0 fades"
            )
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup={self.warmup}: expected a number of updates from 0 (off)")

    def rate_scale(self, delay: float, update: int) -> float:
        """The factor on the learning rate of update `update` (from 0), on a block that is `delay` updates late."""
        scale = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        left = 1.0 if self.discount_updates is None else max(0.0, 1 - update / self.discount_updates)
        return scale * float((1 + delay) ** (-self.discount * left))


def check_can_predict(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer without a momentum that is known here."""
    has_momentum = isinstance(optimizer, _WITH_TWO_MOMENTS) or (
        isinstance(optimizer, SGD) and all(group["momentum"] > 0 for group in optimizer.param_groups)
    )
    if not has_momentum:
        raise ValueError(
            f"predict=True with {type(optimizer).__name__}: weights are predicted from the momentum of SGD "
            "(momentum > 0), Adam, AdamW or NAdam. Use one of them, or predict=False"
        )


@torch.no_grad()
def predict_weights(
    weights: Mapping[str, nn.Parameter], optimizer: Optimizer, steps: float, rate_scale: float
) -> dict[str, torch.Tensor]:
    """`weights` as `steps` further updates along the optimizer's momentum would leave them, in memory of their own.

    A weight without a momentum yet (before its first update, or not trained) stays as it is.
    """
    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    predicted: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        state = optimizer.state.get(weight)
        velocity = _velocity(optimizer, groups[id(weight)], state) if state else None
        if velocity is None:
            predicted[name] = weight.detach().clone()
        else:
            rate = groups[id(weight)]["lr"] * rate_scale
            predicted[name] = weight.detach() - steps * rate * velocity
    return predicted


def _velocity(optimizer: Optimizer, group: dict[str, Any], state: Mapping[str, Any]) -> torch.Tensor | None:
    """The direction of the coming updates, in units of the learning rate."""
    if isinstance(optimizer, SGD):
        momentum = state.get("momentum_buffer")
        return -momentum if momentum is not None and group["maximize"] else momentum
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    mean = state["exp_avg"] / (1 - beta1**step)
    spread = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
    velocity: torch.Tensor = mean / spread
    return -velocity if group["maximize"] else velocity
