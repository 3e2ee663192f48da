"""The memorising guard: how much lower the loss of an example is once it has been used.

    handed_out(kinds)    for each row of a batch: first use, later use, or not known
    observe(losses)      kept on their device; those of whole batches as their number, sum and least
    gap                  one copy to the host, then sums by update and kind; so too at every 100th observation

An update's first uses are compared with the later uses of the same update, which have their losses under the same
parameters: progress is the same for both. Where an update has one kind only (unit="batch"), a first use is compared
with the mean of the nearest later uses before and after it, so that steady progress cancels out.

With weights w_u = n m / (n + m), for n first and m later uses, the gap is sum(w_u (first_u - later_u)) /
|sum(w_u first_u)| over the latest WINDOW updates. It is surely over a limit if it is by the standard error
of the ratio and the sum above is over limit times the one below by the standard error of that difference.

The limits of the warning come from benchmarks/echo_gap.py. At e = 2 and 4, where echoing was worth three quarters
of its factor and more, the gap stayed below 0.4; where it was worth a third or less the gap came to 0.7 and more,
but once to 0.23 only (text at e = 16 from a small buffer).
"""

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.echo.plan import IntArray

FIRST, LATER, UNKNOWN = 0, 1, 2
"""Kinds of use. UNKNOWN: a resident of a state that does not say."""

Kinds = NDArray[np.int8]
Floats = NDArray[np.float64]

WINDOW = 400
"""Updates that the gap is taken over."""
CHECK_EVERY = 100
"""Observations between looks at the gap."""
_LEAST_COMPARED = 5  # updates with first uses
_LARGE = 0.5  # a gap that is told of
_LARGE_IF_RISING = 0.1  # the same where the losses of first uses rise
_SURE = 4  # standard errors
_SURE_OF_EXCESS = 3  # those of above - limit * below
_BLOCK = 25  # updates
_LEAST_BLOCKS = 5
_ROUNDING = 1e-3  # of the mean loss: this far below 0 is no negative loss
_STEP_LOOPS = ("lightning.pytorch.loops.training_epoch_loop", "pytorch_lightning.loops.training_epoch_loop")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over the size of another sum."""

    value: float
    standard_error: float
    """From blocks of updates: neighbouring ones have examples in common."""
    above: Floats
    """The part of each block in the sum above."""
    below: Floats
    """The part of each block in the size of the sum below."""

    @classmethod
    def of(cls, above: Floats, below: Floats, updates: IntArray) -> "Ratio | None":
        """From the parts of both sums, of the updates with these numbers; None if the sum below is zero."""
        scale = float(below.sum())
        if not scale:
            return None
        value = float(above.sum()) / abs(scale)
        names, block = np.unique(updates // _BLOCK, return_inverse=True)
        aboves = np.bincount(block, above).astype(np.float64)
        belows = np.bincount(block, below * math.copysign(1, scale)).astype(np.float64)
        residuals = aboves - value * belows
        variance = float(np.dot(residuals, residuals)) * len(names) / max(1, len(names) - 1)
        return cls(value, math.sqrt(variance) / abs(scale), aboves, belows)

    def is_surely_over(self, limit: float) -> bool:
        """Whether this exceeds `limit` by its standard errors, and above - limit * below exceeds 0 by those of it.

        The latter is Fieller's (1954). The ratio's own standard error is next to zero where few blocks make up both
        sums, as where losses are small with rare large ones.
        """
        num_blocks = len(self.above)
        if num_blocks < _LEAST_BLOCKS:
            return False
        excess = self.above - limit * self.below
        error = float(excess.std(ddof=1)) / math.sqrt(num_blocks)
        return self.value - _SURE * self.standard_error > limit and bool(excess.mean() > _SURE_OF_EXCESS * error)


class EchoGap:
    """Collects the losses of the batches that a loader hands out."""

    def __init__(self) -> None:
        self._kinds: Kinds | None = None
        self._is_whole = False
        self._was_observed = False
        self._pending: list[tuple[torch.Tensor, Kinds]] = []
        self._sums = np.zeros((0, 5))
        self._num_observed = 0
        self._may_warn = True

    def handed_out(self, kinds: Kinds, *, is_whole: bool) -> None:
        """The training loop gets a batch; `is_whole`: one item, all of whose losses are of one kind."""
        self._kinds, self._is_whole, self._was_observed = kinds, is_whole, False

    def forget_batch(self) -> None:
        """There is no latest batch: a state was loaded."""
        self._kinds, self._was_observed = None, False

    def observe(self, losses: Any, *, may_be_short: bool = False) -> None:
        """See `EchoLoader.observe`; `may_be_short`: examples may be missing, or another one in the place of all.

        Then a batch does not count that is short, or has one row: it may be the other one.
        """
        if self._kinds is None or self._was_observed:
            found = "the latest batch was observed already" if self._was_observed else "no batch was handed out yet"
            raise ValueError(
                f"observe: {found}. Expected one call for a batch, after its losses were "
                "computed and before the next batch is fetched"
            )
        if not self._num_observed and _is_fetched_ahead():
            raise ValueError(
                "observe: Lightning fetches a batch ahead of the training step from a loader without a length, so "
                "the latest batch is not the one in the step. Expected a loader with a length: a number as factor, "
                "or with stretto.echo updates_per_epoch=N"
            )
        values = _as_tensor(losses)
        kinds = self._kinds
        if self._is_whole:
            if not values.numel():
                raise ValueError("observe: found 0 losses, expected those of the batch's examples, one or more")
            values = _reduced(values)
        elif may_be_short and values.ndim == 1 and len(values) < len(kinds):
            self._was_observed = True
            return
        elif values.shape != kinds.shape:
            raise ValueError(
                f"observe: found losses of shape {tuple(values.shape)}, expected {kinds.shape}: one for each "
                'example of the latest batch, in its order, such as F.cross_entropy(..., reduction="none") gives'
            )
        self._was_observed = True
        if may_be_short and len(kinds) == 1:
            return
        if self._pending and self._pending[-1][0].device != values.device:
            self._read()
        self._pending.append((values, kinds))
        self._num_observed += 1
        if self._num_observed % CHECK_EVERY == 0:
            self._read()
            self._warn()

    @property
    def gap(self) -> float | None:
        """See `EchoStats.echo_gap`."""
        if not self._num_observed:
            return None
        self._read()
        estimate = self.estimate()
        return None if estimate is None else estimate.value

    def estimate(self) -> Ratio | None:
        """The gap; None before enough updates can be compared, or if the losses are zero."""
        num_first, sum_first, num_later, sum_later, _ = self._sums.T
        at = np.flatnonzero(num_first)
        later = np.flatnonzero(num_later)
        own = num_later[at] > 0
        behind = np.searchsorted(later, at)
        is_compared = own | ((behind > 0) & (behind < len(later)))
        at, own, behind = at[is_compared], own[is_compared], behind[is_compared]
        if len(at) < _LEAST_COMPARED:
            return None
        before = np.where(own, at, later[behind - 1])
        after = np.where(own, at, later[np.minimum(behind, len(later) - 1)])
        mean = sum_later / np.maximum(num_later, 1)
        num = np.where(own, num_later[at], num_later[before] + num_later[after])
        weight = num_first[at] * num / (num_first[at] + num)
        first = sum_first[at] / num_first[at]
        lower = weight * (first - (mean[before] + mean[after]) / 2)
        return Ratio.of(lower, weight * first, at)

    def _fresh_loss_rises(self) -> bool:
        """Whether the losses of first uses surely rise in a whole window, and more than those of later uses."""
        if len(self._sums) < WINDOW:
            return False
        num_first, sum_first, num_later, sum_later, _ = self._sums.T
        first, later = _rise(sum_first, num_first), _rise(sum_later, num_later)
        if first is None or later is None:
            return False
        (rise, error), (other_rise, other_error) = first, later
        return rise > _SURE * error and rise - other_rise > _SURE * math.hypot(error, other_error)

    def _read(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []  # what cannot be read is not tried again
        values = torch.cat([values for values, _ in pending]).cpu().double().numpy()
        kinds = np.concatenate([kinds for _, kinds in pending])
        starts = np.cumsum([0, *(len(kinds) for _, kinds in pending[:-1])])
        if self._is_whole:
            num, total, least = values.reshape(-1, 3).T
        else:
            num = np.isfinite(values).astype(np.float64)
            total = least = np.where(num, values, 0.0)
        columns = []
        for kind in (FIRST, LATER):
            columns.append(np.add.reduceat(np.where(kinds == kind, num, 0.0), starts))
            columns.append(np.add.reduceat(np.where(kinds == kind, total, 0.0), starts))
        columns.append(np.minimum.reduceat(np.where(kinds == UNKNOWN, 0.0, least), starts))
        self._sums = np.concatenate([self._sums, np.stack(columns, 1)])[-WINDOW:]

    def _can_be_negative(self) -> bool:
        """Whether a loss of the window is below 0 by more than rounding makes it."""
        num_first, sum_first, num_later, sum_later, least = self._sums.T
        mean = (sum_first.sum() + sum_later.sum()) / max(1, num_first.sum() + num_later.sum())
        return bool(least.min() < -_ROUNDING * mean)

    def _warn(self) -> None:
        estimate = self.estimate()
        if not self._may_warn or estimate is None:
            return
        if self._can_be_negative():  # parts of a loss mean something only where 0 is the best
            return
        rises = estimate.is_surely_over(_LARGE_IF_RISING) and self._fresh_loss_rises()
        if not (rises or estimate.is_surely_over(_LARGE)):
            return
        self._may_warn = False
        warnings.warn(
            f"the loss of examples that were used before is {estimate.value:.0%} below that of fresh ones"
            f"{', which rises' * rises} (echo_gap): the model learns by heart what is in the buffer, and more uses "
            "of it teach little. Use a smaller factor, a larger buffer, or augmentation behind the echo (augment=)",
            stacklevel=_stacklevel(),
        )


def _stacklevel() -> int:
    """For `warnings.warn` in the caller: that of the first frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith("stretto."):
        level, frame = level + 1, frame.f_back
    return level


def _is_fetched_ahead() -> bool:
    """Whether this runs in a step of Lightning's Trainer that holds further batches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _STEP_LOOPS and "data_fetcher" in frame.f_locals:
            return bool(getattr(frame.f_locals["data_fetcher"], "batches", ()))
        frame = frame.f_back
    return False


def _rise(sums: Floats, nums: Floats) -> tuple[float, float] | None:
    """How much higher the mean is in the later half of the updates, and the standard error; None without a mean."""
    half = len(sums) // 2
    before, after = (Ratio.of(sums[of], nums[of], np.arange(half)) for of in (slice(half), slice(-half, None)))
    if before is None or after is None:
        return None
    return after.value - before.value, math.hypot(before.standard_error, after.standard_error)


def _reduced(losses: torch.Tensor) -> torch.Tensor:
    """The number, sum and least of those that are finite, on their device, without waiting for it."""
    is_finite = losses.isfinite()
    values = losses.nan_to_num(0.0, 0.0, 0.0)
    return torch.stack([is_finite.sum(dtype=values.dtype), values.sum(), values.amin()])


def _as_tensor(losses: Any) -> torch.Tensor:
    """A copy of the losses in floats, detached, on their device. Raises TypeError for what cannot be read so."""
    expected = "expected a tensor, an array or a sequence of real numbers, one for each example"
    if isinstance(losses, torch.Tensor):
        if losses.dtype == torch.bool or losses.is_complex():
            raise TypeError(f"observe: found losses of {losses.dtype}, {expected}")
        if losses.layout != torch.strided or losses.is_meta:
            raise TypeError(f"observe: found losses of {losses.layout} on {losses.device}, {expected}")
        dtype = torch.float64 if losses.dtype == torch.float64 else torch.float32
        # The training step may go on to change them in place.
        return losses.detach().to(dtype, copy=True)
    try:
        array = np.array(losses if isinstance(losses, np.ndarray | Sequence) else None)
    except (TypeError, ValueError, RuntimeError):  # ragged, or tensors that cannot become numbers unasked
        array = np.array(None)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"observe: found losses={losses!r:.60}, a {type(losses).__name__}: {expected}")
    return torch.from_numpy(array.astype(np.float64))
