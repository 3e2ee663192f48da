"""What ranks agree on: numbers of a few bytes, at the start of an epoch or at an interval, never at a step."""

import torch
import torch.distributed as dist

from stretto.echo.settings import rank_and_world_size


def largest(value: float) -> float:
    """The largest `value` of all ranks. A collective call where there are several."""
    if rank_and_world_size()[1] == 1:
        return value
    # NCCL alone takes no CPU tensors.
    device = "cpu" if "cpu" in dist.get_backend_config() else f"cuda:{torch.cuda.current_device()}"
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def smallest(value: float) -> float:
    """The smallest `value` of all ranks. A collective call where there are several."""
    return -largest(-value)
