"""A checkpoint on disk, the same whether one process wrote it or many.

    FOLDER/.metadata, __0_0.distcp, ...    torch.distributed.checkpoint: "model.NAME", "optimizer.state.NAME.KEY"
    FOLDER/block_0.pt, ...                 everything else of each block (of replica r > 0: block_0_replica_r.pt,
                                           with the buffers, which replicas do not share)

Block files are read with weights_only. All is written to FOLDER.stretto-saving, which is renamed when all processes
have finished; an older checkpoint of the name is FOLDER.stretto-replaced in between, and found there after a crash.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from stretto.pipelining.block_state import State
from stretto.pipelining.meeting import Agreed, Meeting, together

_METADATA = ".metadata"


def write(folder: Path, num_batches: int, capture: Callable[[], list[State]], meeting: Meeting) -> None:
    """Write the states that `capture` gives after `num_batches` in each process.

    Collective; the same error in all if one has one.
    """
    names, counts = zip(*together(meeting, lambda: (folder.name, num_batches)), strict=True)
    check_same_step(counts, meeting)
    if len(set(names)) > 1:
        raise meeting.refuse(ValueError(f"the processes save to {sorted(set(names))}: expected one folder"))
    temporary = _beside(folder, "saving")
    try:
        _write(folder, temporary, capture, meeting)
    except BaseException as error:
        if meeting.rank == 0 or isinstance(error, Agreed):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def read(folder: Path, index: int, replica: int, check: Callable[[State], None]) -> State:
    """The state of one block. `check` gets it before its tensors are read.

    Raises FileNotFoundError where there is no folder, ValueError for one that is no whole checkpoint.
    """
    found = folder
    if not folder.exists():
        found = _beside(folder, "replaced")  # a crash between two renames
        if not found.exists():
            raise FileNotFoundError(f"{folder}: expected a folder that save() wrote, there is none of this name")
    file = found / _file_name(index, replica)
    present = sorted(each.name for each in found.glob("block_*.pt"))
    if not (found / _METADATA).exists():
        raise ValueError(f"{found} is no checkpoint, or not a whole one: it has no {_METADATA}")
    if not file.exists():
        raise ValueError(
            f"{found} has no {file.name}, but {present}: it is not whole, or of other numbers of blocks or replicas"
        )
    try:
        rest = torch.load(file, weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    check(rest)
    listed = rest.pop("in_shards")
    try:
        tensors = _read_tensors(found, listed)
    except Exception as error:
        raise ValueError(f"the tensors of block {index} in {found} cannot be read: {error}") from error
    for name in listed["model"]:
        rest["model"][name] = tensors[_model_key(name)]
    for name, key in listed["optimizer"]:
        rest["optimizer"]["state"][name][key] = tensors[_optimizer_key(name, key)]
    state: State = rest
    return state


def _write(folder: Path, temporary: Path, capture: Callable[[], list[State]], meeting: Meeting) -> None:
    from stretto.pipelining.shards import ShardWriter  # noqa: PLC0415  (slow to import)

    halves: list[tuple[dict[str, Any], State]] = []

    def begin() -> None:
        if meeting.rank == 0:
            _prepare(folder, temporary)
        halves.extend(_split(state) for state in capture())

    together(meeting, begin)

    shards: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for tensors, _ in halves:
        shards["model"] |= tensors["model"]
        shards["optimizer"]["state"] |= tensors["optimizer"]
    writer = ShardWriter(temporary, shards, meeting.rank)
    plans = together(meeting, writer.plan)

    def write_out() -> tuple[Any, list[str]]:
        return writer.write(plans), [_write_file(temporary, rest) for _, rest in halves]

    receipts, files = zip(*together(meeting, write_out), strict=True)

    def finish() -> None:
        if meeting.rank == 0:
            if missing := [name for each in files for name in each if not (temporary / name).exists()]:
                raise FileNotFoundError(
                    f"{temporary} lacks {missing}, which other processes wrote: expected a file system that all see"
                )
            writer.finish(receipts)
            _replace(folder, temporary)

    together(meeting, finish)


def check_same_step(counts: Iterable[int], meeting: Meeting) -> None:
    """Raise ValueError in all processes unless all blocks have seen the same number of batches."""
    if len(found := set(counts)) > 1:
        raise meeting.refuse(
            ValueError(
                f"blocks have seen {sorted(found)} batches: expected all of them at the end of the same step"
            )
        )


def _split(state: State) -> tuple[dict[str, Any], State]:
    """What goes under shared names, which the first replica writes, and the rest of a state."""
    is_first = state["settings"]["replica"] == 0
    shared: dict[str, Any] = {"model": {}, "optimizer": {}}
    rest: State = {**state, "model": {}, "in_shards": {"model": [], "optimizer": []}}
    for name, value in state["model"].items():
        if isinstance(value, torch.Tensor) and (is_first or name in state["parameters"]):
            shared["model"][name] = value
            rest["in_shards"]["model"].append(name)
        else:
            rest["model"][name] = value
    if state["optimizer"] is not None:
        rest["optimizer"] = {**state["optimizer"], "state": {}}
        for name, entry in state["optimizer"]["state"].items():
            parts = entry if isinstance(entry, dict) else {}
            tensors = {key: value for key, value in parts.items() if isinstance(value, torch.Tensor)}
            others = {key: value for key, value in parts.items() if key not in tensors}
            shared["optimizer"][name] = tensors
            rest["optimizer"]["state"][name] = others if isinstance(entry, dict) else entry
            rest["in_shards"]["optimizer"] += [(name, key) for key in tensors]
    return (shared if is_first else {"model": {}, "optimizer": {}}), rest


def _model_key(name: str) -> str:
    return f"model.{name}"


def _optimizer_key(name: str, key: str) -> str:
    return f"optimizer.state.{name}.{key}"


def _read_tensors(folder: Path, listed: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of one block, under the names they have in the shards."""
    from stretto.pipelining.shards import read_tensors  # noqa: PLC0415  (slow to import)

    keys = [_model_key(name) for name in listed["model"]]
    keys += [_optimizer_key(name, key) for name, key in listed["optimizer"]]
    return read_tensors(folder, keys)


def _file_name(index: int, replica: int) -> str:
    return f"block_{index}.pt" if replica == 0 else f"block_{index}_replica_{replica}.pt"


def _write_file(folder: Path, state: State) -> str:
    name = _file_name(state["settings"]["block"], state["settings"]["replica"])
    with (folder / name).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return name


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.stretto-{ending}")


def _prepare(folder: Path, temporary: Path) -> None:
    """An empty temporary folder, and nothing left of a save that crashed."""
    replaced = _beside(folder, "replaced")
    if not folder.exists() and replaced.exists():
        replaced.rename(folder)
    is_checkpoint = all((folder / name).exists() for name in (_METADATA, _file_name(0, 0)))
    if folder.exists() and not is_checkpoint and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is no checkpoint: it is not replaced. Save to another folder")
    for leftover in (replaced, temporary):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir(parents=True)


def _replace(folder: Path, temporary: Path) -> None:
    replaced = _beside(folder, "replaced")
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
