"""What two ranks see of loaders of their own, without a trainer. Run by torchrun.py."""

from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from stretto import EchoDataLoader
from tests.echo.workers.scripts.common import Rows, Slow, Wide, add_noise, echo_loader, finish, rank, write


def batches_of(loader: EchoDataLoader) -> list[Any]:
    return [batch.tolist() for batch in loader]


def sharded(num_workers: int) -> dict[str, Any]:
    """The usual loop around a DistributedSampler."""
    sampler = DistributedSampler(Rows(61), seed=1)
    loader = echo_loader(61, num_workers, shuffle=None, sampler=sampler)
    seen: list[Any] = []
    state: dict[str, Any] = {}
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen.append([])
        for batch in loader:
            seen[-1].append(batch.tolist())
            if epoch == 1 and len(seen[-1]) == 5:
                state = loader.state_dict()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state)
    return {
        "epochs": seen,
        "reads": loader.stats().reads,
        "rests": [rest_of(other, num_workers) for other in states],
    }


def rest_of(state: dict[str, Any], num_workers: int) -> list[Any]:
    sampler = DistributedSampler(Rows(61), seed=1)
    loader = echo_loader(61, num_workers, shuffle=None, sampler=sampler)
    loader.load_state_dict(state)
    return batches_of(loader)


def own_part(size: int, **arguments: Any) -> EchoDataLoader:
    """Rows of a rank's own, numbered from 1000 * rank on."""
    defaults: dict[str, Any] = {"shuffle": True, "factor": 2.5, "num_workers": 2, "augment": add_noise}
    return EchoDataLoader(Rows(size, 1000 * rank()), 8, **{**defaults, **arguments})


def uneven() -> dict[str, Any]:
    """Rank 0 has 70 rows, rank 1 has 49; in every epoch some others of rank 0 are left out."""
    loader = own_part((70, 49)[rank()])
    seen: list[Any] = [[], []]
    state: dict[str, Any] = {}
    for epoch in seen:
        for batch in loader:
            epoch.append(batch.tolist())
            if len(seen[1]) == 4:
                state = loader.state_dict()
    again = own_part((70, 49)[rank()])
    again.load_state_dict(state)
    stats = loader.stats()
    return {
        "epochs": seen,
        "rest": batches_of(again),
        "dropped_items": stats.dropped_items,
        "reads": stats.reads,
        "updates": stats.updates,
    }


def auto(sizes: tuple[int, int], read_s: tuple[float, float]) -> dict[str, Any]:
    """Ranks that read at different speed."""
    data = Slow(sizes[rank()], read_s[rank()])
    loader = EchoDataLoader(data, 8, shuffle=True, factor="auto", max_factor=4, num_workers=1)
    seen, factors = [], []
    for _ in range(2):
        seen.append(batches_of(loader))
        factors.append(loader.state_dict()["factor"])
    return {
        "updates": list(map(len, seen)),
        "factors": factors,
        "num_examples": [len({row[0] for batch in batches for row in batch}) for batches in seen],
        "dropped_items": loader.stats().dropped_items,
    }


def auto_by_bytes() -> list[int]:
    """Examples of rank 1 are ten times as large, so that its buffer would have room for fewer."""
    data = Wide(300, (100, 1000)[rank()], 0.001)
    loader = EchoDataLoader(data, 8, factor="auto", max_factor=4, buffer="256KiB")
    return [len(list(loader)), len(list(loader))]


def refused() -> list[str]:
    """What a state says that is another rank's, or that another number of ranks saved."""
    loader = own_part(40, num_workers=0)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, loader.state_dict())
    other = states[1 - rank()]
    world = {**states[rank()], "settings": {**states[rank()]["settings"], "world_size": 3}}
    messages = []
    for state in (other, world):
        try:
            loader.load_state_dict(state)
        except ValueError as error:
            messages.append(str(error))
    loader.load_state_dict(states[rank()])
    return messages


def main() -> None:
    dist.init_process_group("gloo")
    results = {
        "sharded 0": sharded(0),
        "sharded 2": sharded(2),
        "uneven": uneven(),
        "auto": auto((160, 160), (0.0, 0.002)),
        "auto uneven": auto((200, 160), (0.002, 0.0)),
        "auto by bytes": auto_by_bytes(),
        "refused": refused(),
    }
    write(results)
    finish()


if __name__ == "__main__":
    main()
