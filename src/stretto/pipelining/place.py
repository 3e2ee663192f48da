"""Where a process stands: which block it holds, who its neighbours are, and that all agree on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.pipelining.meeting import Alone, Starting
from stretto.pipelining.names import check_names, keep_names

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Stage: TypeAlias = "PipelineStage | tuple[nn.Module, int, int]"


@dataclass(frozen=True, slots=True)
class Place:
    """Block `index` of `num_stages`, in the pipeline `ranks`; None for groups where there is one process."""

    module: nn.Module
    index: int
    num_stages: int
    ranks: tuple[int, ...]
    """Global ranks of the blocks, first to last."""
    replicas: tuple[int, ...] | None
    """Global ranks of the processes with the same block, where there are several."""


def open_stage(stage: Any) -> tuple[nn.Module, int, int]:
    """(module, index, num_stages) of a stage. Raises TypeError or ValueError for what is none."""
    if isinstance(stage, tuple) and len(stage) == 3:
        module, index, num_stages = stage
    elif hasattr(stage, "submod") and hasattr(stage, "stage_index"):
        module, index, num_stages = stage.submod, stage.stage_index, stage.num_stages
        if hasattr(stage, "pipe_info"):  # cut by torch's pipeline(), which keeps the names of the model
            keep_names(module)
    else:
        raise TypeError(f"stage={stage!r:.80}: expected a PipelineStage or a tuple (module, index, num_stages)")
    if not isinstance(module, nn.Module):
        raise TypeError(f"the stage's module is a {type(module).__name__}: expected a torch.nn.Module")
    if not (isinstance(index, int) and isinstance(num_stages, int) and 0 <= index < num_stages):
        raise ValueError(f"stage index {index!r} of {num_stages!r}: expected 0 <= index < number of stages")
    return module, index, num_stages


def all_processes(
    stage: Any, group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[Starting | Alone, tuple[int, ...]]:
    """The processes that make a schedule together, and their global ranks.

    Raises ValueError in a process that is none of them.
    """
    if not dist.is_initialized():
        return Alone(), (0,)
    assert dist.group.WORLD is not None
    groups = [group or getattr(stage, "group", None) or dist.group.WORLD]
    ranks = tuple(dist.get_process_group_ranks(groups[0]) if mesh is None else mesh.mesh.flatten().tolist())
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} is not among the processes of the pipeline (ranks {ranks})")
    if mesh is not None:
        # No new group, which torch names by how many each process has made.
        is_world = len(ranks) == dist.get_world_size()
        groups = [dist.group.WORLD] if is_world else [mesh.get_group(at) for at in range(mesh.ndim)]
    return Starting(groups, ranks), ranks


def find_place(
    stage: Any, group: dist.ProcessGroup | None, mesh: DeviceMesh | None, everyone: tuple[int, ...]
) -> Place:
    """The place of this process among the ranks `everyone`: its index must be its rank in the pipeline.

    Raises ValueError for a world, a group or a mesh of another size than the number of stages (times replicas).
    """
    module, index, num_stages = open_stage(stage)
    if not dist.is_initialized():
        if num_stages == 1:
            return Place(module, index, num_stages, everyone, None)
        raise ValueError(
            f"{num_stages} stages, but torch.distributed is not initialised: start the script with "
            f"torchrun --nproc-per-node {num_stages} and call torch.distributed.init_process_group()"
        )
    ranks: tuple[int, ...] = everyone
    replicas: tuple[int, ...] = ()
    if mesh is not None:
        if group is not None or getattr(stage, "group", None) is not None:
            raise ValueError("group and mesh are both given: expected one of them")
        if mesh.ndim != 2 or mesh.size(0) != num_stages:
            raise ValueError(
                f"mesh of shape {tuple(mesh.shape)}: expected ({num_stages} stages, replicas), such as "
                f'init_device_mesh("cpu", ({num_stages}, 2))'
            )
        ranks, replicas = (tuple(dist.get_process_group_ranks(mesh.get_group(at))) for at in range(2))
    if len(ranks) != num_stages:
        raise ValueError(
            f"{len(ranks)} processes for {num_stages} stages: expected one process a stage. For R replicas of each "
            f'start {num_stages} x R and pass mesh=init_device_mesh("cpu", ({num_stages}, R))'
        )
    if (own := ranks.index(dist.get_rank())) != index:
        raise ValueError(
            f"stage {index} on process {own} of the pipeline (ranks {ranks}): expected stage {own} there, "
            "mesh.get_local_rank(0) where there is a mesh"
        )
    return Place(module, index, num_stages, ranks, replicas if len(replicas) > 1 else None)


class Claim(NamedTuple):
    """What a process says of itself when it starts."""

    place: tuple[tuple[int, ...], int]
    """The ranks of its pipeline, and its block."""
    settings: dict[str, Any]
    """Which must be the same everywhere."""
    keys: list[str]
    """Of its block, in the plain model's state_dict."""
    name: str
    """A new one."""


def agree(claims: Sequence[Claim], own: Claim) -> str:
    """The name that all use. Raises ValueError, in all processes, if settings differ or blocks share a key."""
    for at, claim in enumerate(claims):
        for key, value in own.settings.items():
            if claim.settings[key] != value:
                raise ValueError(
                    f"{key}={value!r} here, {key}={claim.settings[key]!r} on process {at}: expected the same"
                )
    check_names([claim.keys for claim in sorted(claims) if claim.place[0] == own.place[0]])
    return claims[0].name
