"""Train with DistributedDataParallel on several ranks, save checkpoints in the middle of epochs, continue from one.

    torchrun --standalone --nproc-per-node 2 examples/two_ranks.py --steps 200 --save runs
    torchrun --standalone --nproc-per-node 2 examples/two_ranks.py --steps 200 --resume runs/100.pt

`--data` is a file of torch.save({"inputs": [N, F] floats, "labels": [N] integers}); without it, numbers are made
up. Each rank reads and echoes its own shard, all make equally many updates, and a continued run gets the batches
that an uninterrupted one would have got.
"""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

import stretto


def load_data(path: Path | None) -> TensorDataset:
    """The examples: the same on every rank, since the sampler cuts them into shards."""
    if path is None:
        inputs = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())
    if not path.is_file():
        raise SystemExit(f"{path} is no file: expected one made by torch.save")
    data = torch.load(path, weights_only=True)
    if not isinstance(data, dict) or {"inputs", "labels"} - data.keys() or data["inputs"].ndim != 2:
        raise SystemExit(f'{path}: expected a dict with "inputs" of shape [N, F] and "labels" of shape [N]')
    return TensorDataset(data["inputs"], data["labels"])


def add_noise(example: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The augmentation: runs for each use, in a worker."""
    inputs, label = example
    return inputs + 0.05 * torch.randn_like(inputs), label


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of tensors, see above")
    parser.add_argument("--steps", type=int, default=200, help="updates in all")
    parser.add_argument("--factor", type=float, default=2.0, help="uses of each example")
    parser.add_argument("--workers", type=int, default=1, help="of each rank")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0, help="the same on every rank")
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=100, help="updates")
    parser.add_argument("--resume", type=Path, help="a checkpoint")
    args = parser.parse_args()

    data = load_data(args.data)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = stretto.EchoDataLoader(
        data,
        batch_size=args.batch_size,
        sampler=DistributedSampler(data, seed=args.seed),
        num_workers=args.workers,
        factor=args.factor,
        augment=add_noise,
        seed=args.seed,
    )
    torch.manual_seed(args.seed)
    num_classes = int(data.tensors[1].max()) + 1
    net = nn.Sequential(nn.Linear(data.tensors[0].shape[1], 64), nn.ReLU(), nn.Linear(64, num_classes))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    update = 0
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        update = state["update"]
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loaders"][rank])  # each rank has a position of its own
    while update < args.steps:
        for inputs, labels in islice(loader, args.steps - update):  # DistributedSampler.set_epoch is called for you
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update += 1
            if rank == 0 and (update == 1 or update % 50 == 0 or update == args.steps):
                print(f"update {update}: loss {loss.item():.6f}", flush=True)
            if args.save and update % args.save_every == 0:
                loaders = gathered(loader.state_dict())
                if rank == 0:
                    args.save.mkdir(parents=True, exist_ok=True)
                    state = {"update": update, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "loaders": loaders}, args.save / f"{update}.pt")
    stats = loader.stats()
    lines = gathered(
        f"rank {rank}: {stats.updates} updates, {stats.fresh_items} fresh examples, {stats.reread} read again"
    )
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
