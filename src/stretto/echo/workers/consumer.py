"""Who iterates an `EchoPlan`: found by walking up the stack when its first batch is drawn.

Trainers build loaders of their own around the plan and hand nothing back: Accelerate's takes every P-th batch of it
and fetches one batch ahead of the training step. The plan has to know P, and how far the step is.
"""

import sys
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

from stretto.echo.order import samplers_of
from stretto.echo.settings import check_int

_DEPTH = 16
_FIT_LOOPS = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
_LIBRARIES = ("torch", "torchdata", "accelerate")


@dataclass(slots=True)
class Consumer:
    """The loader that draws from a plan."""

    num_processes: int = 1
    """Processes among which the batches are dealt out."""
    process_index: int = 0
    num_skipped: int = 0
    """Batches of this process that are drawn and thrown away first (Accelerate's `skip_first_batches`)."""
    is_own: bool = False
    """Whether it is an EchoDataLoader, which says what it gave."""
    is_dispatching: bool = False
    """Whether process 0 draws for all and sends them their part (Accelerate's `dispatch_batches`)."""
    num_fetched_together: int = 1
    _iterator: Any = None
    _ahead: Any = None

    def num_returned(self) -> int | None:
        """Batches that torch's iterator has returned; None once it is gone."""
        iterator = self._iterator() if self._iterator else None
        return None if iterator is None else int(iterator._num_yielded)

    def num_yielded(self) -> int | None:
        """Batches that the training step was given in this process; None once the iterator is gone."""
        num_yielded = self.num_returned()
        if num_yielded is None:
            return None
        ahead = self._ahead() if self._ahead else None
        if ahead is not None and not ahead.end_of_dataloader and num_yielded:
            num_yielded -= (num_yielded - 1) % self.num_fetched_together + 1  # what was fetched last
        return self.num_skipped + num_yielded


def find_consumer(plan: Any) -> Consumer:
    """The consumer in whose call this function runs. Raises ValueError if it cuts batches into pieces."""
    found = Consumer()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            break
        # The locals of other frames are not looked at: Python would keep them alive as long as the frame.
        module = frame.f_globals.get("__name__", "")
        holder: Any = None
        if module.partition(".")[0] in _LIBRARIES:
            holder = frame.f_locals.get("self")
        if module == "stretto.echo.dataloader":
            found.is_own = True
        elif holder is not None:
            if _deals_out(holder, plan):
                found.num_processes, found.process_index = holder.num_processes, holder.process_index
            elif type(holder).__name__ == "SkipBatchSampler":
                found.num_skipped += holder.skip_batches
            elif hasattr(holder, "_num_yielded") and not found._iterator:
                found._iterator = weakref.ref(holder)
            elif hasattr(holder, "end_of_dataloader"):
                found._ahead = weakref.ref(holder)
                if type(holder).__name__ == "DataLoaderDispatcher":
                    found.is_dispatching = True
                    found.num_fetched_together = 1 if holder.split_batches else holder.state.num_processes
        frame = frame.f_back
    return found


def epoch_of_trainer() -> int:
    """The epoch that Lightning's Trainer is in, if it is up the stack, else 0.

    It loads no loader's state from a checkpoint that it saved at an epoch's end.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _FIT_LOOPS:
            return int(frame.f_locals["self"].epoch_progress.current.processed)
        frame = frame.f_back
    return 0


class EpochNumber:
    """The number of the next epoch: the trainer's at first, then one more each time."""

    def __init__(self) -> None:
        self.has_begun = False
        self._next_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Number the first epoch, at a run's start; once epochs have begun they count on by themselves."""
        check_int("epoch", epoch, at_least=0)
        if not self.has_begun:
            self._next_epoch = epoch

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that `iter()` begins."""
        if not self.has_begun and not self._next_epoch:  # a trainer may have numbered the sampler
            numbers = [getattr(sampler, "epoch", 0) for sampler in samplers_of(self)]
            return max([epoch_of_trainer(), *(number for number in numbers if isinstance(number, int))])
        return self._next_epoch


def num_processes_of_caller(plan: Any) -> int | None:
    """P if what called the caller deals the plan's batches out among P processes."""
    holder: Any = sys._getframe(2).f_locals.get("self")
    return int(holder.num_processes) if _deals_out(holder, plan) else None


def _deals_out(holder: Any, plan: Any) -> bool:
    """Whether `holder` is an Accelerate BatchSamplerShard of the plan."""
    if type(holder).__name__ != "BatchSamplerShard" or holder.batch_sampler is not plan:
        return False
    if holder.num_processes > 1 and holder.split_batches:
        raise ValueError(
            "split_batches=True cuts each batch into pieces for the processes, so that an example would be read by "
            "all of them: use split_batches=False with an EchoDataLoader"
        )
    return True
