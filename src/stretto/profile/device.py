"""How long an accelerator had nothing to do while the script waited for a batch.

A step is queued, not run, when the script asks for the next batch. An event recorded before the wait completes
when the queue is done, one recorded after it at once: the time between the two is the stall that the accelerator
saw, and a wait that is hidden behind queued kernels is none.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


class DeviceClock:
    """Pairs of events around waits, read when they have completed; nothing here waits for the accelerator."""

    def __init__(self, device: torch.device, record: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        self._device = device
        self._synchronize = synchronize
        self._pending: deque[tuple[float, Any, Any]] = deque()
        self.mark = record
        """An event at the present end of the queue."""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceClock | None":
        """For a device whose events have times; None where there are none."""
        if device.type != "cuda":
            return None

        def record() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))  # the current device may be another one
            return event

        return cls(device, record, lambda: torch.cuda.synchronize(device))

    def time_transfer(self, batch: Any) -> float:
        """Seconds that copying the batch's tensors to the accelerator takes; it waits, so not for each batch."""
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._synchronize()
        begin = time.perf_counter()
        for leaf in leaves:
            leaf.to(self._device, non_blocking=True)
        self._synchronize()
        return time.perf_counter() - begin

    def measure(self, before: Any, begin: float) -> list[tuple[float, float]]:
        """End the wait that began at `begin` with the event `before`.

        Returns the (begin, stall in seconds) of earlier waits that are known by now.
        """
        self._pending.append((begin, before, self.mark()))
        known: list[tuple[float, float]] = []
        while self._pending and self._pending[0][2].query():
            since, first, second = self._pending.popleft()
            known.append((since, first.elapsed_time(second) / 1e3))
        return known
