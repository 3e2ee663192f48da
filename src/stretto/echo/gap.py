"""The memorising guard: how much lower the loss of an example is once it has been used.

    handed_out(kinds)    for each row of a batch: first use, later use, or not known
    observe(losses)      kept as they are, on their device
    gap                  one copy to the host, then sums by update and kind; so too at every 100th observation

An update's first uses are compared with the later uses of the same update, which have their losses under the same
parameters: progress is the same for both. Where an update has one kind only (unit="batch"), a first use is compared
with the mean of the nearest later uses before and after it, so that steady progress cancels out.

With weights w_u = n m / (n + m), for n first and m later uses, the gap is sum(w_u (first_u - later_u)) /
|sum(w_u first_u)| over the latest WINDOW updates. The standard error is that of a ratio.

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
_BLOCK = 25  # updates
_LEAST_BLOCKS = 5
_STEP_LOOPS = ("lightning.pytorch.loops.training_epoch_loop", "pytorch_lightning.loops.training_epoch_loop")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over the size of another sum."""

    value: float
    standard_error: float
    """From blocks of updates: neighbouring ones have examples in common."""
    num_blocks: int

    @classmethod
    def of(cls, above: Floats, below: Floats, updates: IntArray) -> "Ratio | None":
        """From the parts of both sums, of the updates with these numbers; None if the sum below is zero."""
        scale = float(below.sum())
        if not scale:
            return None
        value = float(above.sum()) / abs(scale)
        blocks = np.bincount(updates // _BLOCK, above - value * math.copysign(1, scale) * below)
        num_blocks = len(np.unique(updates // _BLOCK))
        variance = float(np.dot(blocks, blocks)) * num_blocks / max(1, num_blocks - 1)
        return cls(value, math.sqrt(variance) / abs(scale), num_blocks)


class EchoGap:
    """Collects the losses of the batches that a loader hands out."""

    def __init__(self) -> None:
        self._kinds: Kinds | None = None
        self._is_whole = False
        self._was_observed = False
        self._pending: list[tuple[torch.Tensor, Kinds]] = []
        self._sums = np.zeros((0, 4))
        self._num_observed = 0
        self._may_warn = True

    def handed_out(self, kinds: Kinds, *, is_whole: bool) -> None:
        """The training loop gets a batch; `is_whole`: one item, all of whose losses are of one kind."""
        self._kinds, self._is_whole, self._was_observed = kinds, is_whole, False

    def forget_batch(self) -> None:
        """There is no latest batch: a state was loaded."""
        self._kinds, self._was_observed = None, False

    def observe(self, losses: Any, *, may_be_short: bool = False) -> None:
        """See `EchoLoader.observe`; `may_be_short`: examples may be missing, and then the batch does not count."""
        if self._kinds is None or self._was_observed:
            found = "observed already" if self._was_observed else "none handed out yet"
            raise ValueError(
                f"observe: the latest batch was {found}. Expected one call for a batch, after its losses were "
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
            values = values.reshape(-1)
            kinds = kinds.repeat(len(values))
        elif may_be_short and values.ndim == 1 and len(values) < len(kinds):
            self._was_observed = True
            return
        elif values.shape != kinds.shape:
            raise ValueError(
                f"observe: found losses of shape {tuple(values.shape)}, expected {kinds.shape}: one for each "
                'example of the latest batch, in its order, such as F.cross_entropy(..., reduction="none") gives'
            )
        self._was_observed = True
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
        num_first, sum_first, num_later, sum_later = self._sums.T
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
        """Whether the losses of first uses are surely higher in the later half of a whole window."""
        if len(self._sums) < WINDOW:
            return False
        halves = np.split(self._sums, [len(self._sums) // 2])
        earlier, later = (Ratio.of(half[:, 1], half[:, 0], np.arange(len(half))) for half in halves)
        if earlier is None or later is None:
            return False
        return later.value - earlier.value > _SURE * math.hypot(earlier.standard_error, later.standard_error)

    def _read(self) -> None:
        if not self._pending:
            return
        values = torch.cat([values for values, _ in self._pending]).cpu().double().numpy()
        kinds = np.concatenate([kinds for _, kinds in self._pending])
        starts = np.cumsum([0, *(len(kinds) for _, kinds in self._pending[:-1])])
        self._pending = []
        is_finite = np.isfinite(values)
        if (values[is_finite] < 0).any():  # parts of a loss mean something only where 0 is the best
            self._may_warn = False
        columns = []
        for kind in (FIRST, LATER):
            chosen = is_finite & (kinds == kind)
            columns.append(np.add.reduceat(chosen, starts, dtype=np.float64))
            columns.append(np.add.reduceat(np.where(chosen, values, 0.0), starts))
        self._sums = np.concatenate([self._sums, np.stack(columns, 1)])[-WINDOW:]

    def _warn(self) -> None:
        estimate = self.estimate()
        if not self._may_warn or estimate is None or estimate.num_blocks < _LEAST_BLOCKS:
            return
        surely = estimate.value - _SURE * estimate.standard_error
        rises = surely > _LARGE_IF_RISING and self._fresh_loss_rises()
        if not (rises or surely > _LARGE):
            return
        self._may_warn = False
        warnings.warn(
            f"the loss of examples that were used before is {estimate.value:.0%} below that of fresh ones"
            f"{', which rises' * rises} (echo_gap): the model learns by heart what is in the buffer, and more uses "
            "of it teach little. Use a smaller factor, a larger buffer, or augmentation behind the echo (augment=)",
            stacklevel=4,
        )


def _is_fetched_ahead() -> bool:
    """Whether this runs in a step of Lightning's Trainer that holds further batches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _STEP_LOOPS and "data_fetcher" in frame.f_locals:
            return bool(getattr(frame.f_locals["data_fetcher"], "batches", ()))
        frame = frame.f_back
    return False


def _as_tensor(losses: Any) -> torch.Tensor:
    """A copy of the losses, detached, on their device. Raises TypeError for what is no number."""
    expected = "expected a tensor, an array or a sequence of real numbers, one for each example"
    if isinstance(losses, torch.Tensor):
        if losses.dtype == torch.bool or losses.is_complex():
            raise TypeError(f"observe: found losses of {losses.dtype}, {expected}")
        # The training step may go on to change them in place.
        return losses.detach().clone()
    try:
        array = np.array(losses if isinstance(losses, np.ndarray | Sequence) else None)
    except (TypeError, ValueError, RuntimeError):  # ragged, or tensors that cannot become numbers unasked
        array = np.array(None)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"observe: found losses={losses!r:.60}, a {type(losses).__name__}: {expected}")
    return torch.from_numpy(array.astype(np.float64))
