"""The tensors of a checkpoint, through torch.distributed.checkpoint, in steps between which the processes meet.

Imported when a checkpoint is written or read, as torch.distributed.checkpoint takes as long as all of stretto.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class ShardWriter:
    """Writes one process's `tensors`, a nested dict, to `folder`. The first process (`rank` 0) coordinates."""

    def __init__(self, folder: Path, tensors: dict[str, Any], rank: int) -> None:
        self._planner, self._writer = DefaultSavePlanner(), FileSystemWriter(folder)
        self._tensors = tensors
        self._rank = rank
        self._metadata: Any = None

    def plan(self) -> Any:
        """What this process would write."""
        with _plain_errors():
            self._planner.set_up_planner(self._tensors, is_coordinator=self._rank == 0)
            self._writer.set_up_storage_writer(self._rank == 0)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plans: list[Any]) -> Any:
        """Write what falls to this process, given the plans of all. Returns a receipt."""
        with _plain_errors():
            agreed, self._metadata = self._planner.create_global_plan(plans)
            own = self._planner.finish_plan(self._writer.prepare_global_plan(agreed)[self._rank])
            written = self._writer.write_data(own, self._planner)
            written.wait()
            return written.value()

    def finish(self, receipts: Sequence[Any]) -> None:
        """Write the table of contents; for rank 0, with the receipts of all."""
        with _plain_errors():
            self._writer.finish(self._metadata, list(receipts))


def read_tensors(folder: Path, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of `folder` under `keys`, on the CPU. Raises ValueError where there is none of a key."""
    if not keys:
        return {}
    with _plain_errors():
        reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
        metadata = reader.read_metadata()
        tensors: dict[str, Any] = {}
        for key in keys:
            entry = metadata.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"its table of contents has no tensor {key}")
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner.set_up_planner(tensors, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        local_plan = reader.prepare_local_plan(planner.create_local_plan())
        [plan] = reader.prepare_global_plan(planner.create_global_plan([local_plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return tensors


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch's CheckpointException is no Exception, and would pass by whoever handles those."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error
