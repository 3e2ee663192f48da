"""How long an accelerator had nothing to do while the script waited for a batch.

A step is queued, not run, when the script asks for the next batch. An event recorded before the wait completes
when the queue is done, one recorded after it at once: the time between the two is the stall that the accelerator
saw, and a wait that is hidden behind queued kernels is none.
"""

from collections import deque
from typing import Any

import torch


class DeviceClock:
    """Pairs of events around waits, read when they have completed; nothing here waits for the accelerator."""

    def __init__(self, make_event: Any) -> None:
        self._make_event = make_event
        self._pending: deque[tuple[float, Any, Any]] = deque()

    @classmethod
    def of(cls, device: torch.device) -> "DeviceClock | None":
        """For a device whose events have times; None where there are none."""
        if device.type != "cuda":
            return None
        return cls(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """An event at the present end of the queue."""
        event = self._make_event()
        event.record()
        return event

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
