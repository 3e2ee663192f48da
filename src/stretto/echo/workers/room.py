"""How many items the workers of a loader keep: what a bound in bytes comes to is measured on some examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from stretto.echo.buffer import DEFAULT_BYTES, Bound
from stretto.echo.workers.memory import NUM_PROBED, Probe, count_residents
from stretto.echo.workers.parts import Parts


@dataclass(slots=True, kw_only=True)
class Room:
    """Counts the residents for a plan.

    It does not hold the loader, which holds the plan: in a cycle they would outlive their last use, and so would
    persistent workers.
    """

    dataset: Any
    parts: Parts
    bound: Bound | None
    is_whole: bool
    """Items are batches that stay whole."""
    factor: float
    """Of the items; infinity where it is not known."""
    num_workers: int
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any

    def count_residents(self, head: list[Any], draw_size: int) -> int:
        """See `PlanSettings`; a bound in bytes becomes a count from what the first examples cost."""
        num_workers = max(1, self.num_workers)
        num_bytes = DEFAULT_BYTES if self.bound is None else self.bound.num_bytes
        sizes: list[float] = []
        if num_bytes is not None:
            per_item = 1.0
            if self.is_whole:
                per_item = sum(map(len, head)) / max(1, len(head))
                head = [index for batch in head for index in batch][:NUM_PROBED]
            sizes = [per_item * size for size in self._probe(head) if size]
        count = count_residents(self.bound, sizes, draw_size, num_workers, self.factor)
        if num_bytes is not None and sizes:
            self.parts.board.share_bytes = max(num_bytes // num_workers, int(max(sizes) * draw_size))
        return count

    def _probe(self, indices: list[Any]) -> list[int]:
        """Bytes of some examples, read in workers like those that will keep them."""
        num_workers = min(self.num_workers, len(indices))
        return list(
            DataLoader(
                Probe(self.dataset, self.parts, indices),
                batch_size=None,
                sampler=range(len(indices)),
                num_workers=num_workers,
                timeout=self.timeout if num_workers else 0,
                worker_init_fn=self.worker_init_fn,
                multiprocessing_context=self.multiprocessing_context if num_workers else None,
                generator=torch.Generator(),  # the global one is not drawn from
            )
        )
