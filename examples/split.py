"""Train a model that is split over several processes, none of which waits for the others (layer-wise staleness).

    torchrun --standalone --nproc-per-node 2 examples/split.py --epochs 5
    torchrun --standalone --nproc-per-node 3 examples/split.py --epochs 5 --stop-after 3 --save runs/split
    torchrun --standalone --nproc-per-node 3 examples/split.py --epochs 5 --resume runs/split

`--data` is a file of torch.save({"images": [N, C, H, W] floats, "labels": [N] integers}); without it, pictures are
made up. Every process makes the whole model and keeps its block; block 0 reads the data, the last one has the loss.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.pipelining import ScheduleDSP, Staleness, partition


def load_data(path: Path | None) -> TensorDataset:
    """The examples; block 0 reads them, the other processes look at their shape only."""
    if path is None:
        random = torch.Generator().manual_seed(0)
        labels = torch.randint(4, (1200,), generator=random)
        images = 0.7 * torch.randn(1200, 1, 16, 16, generator=random)
        for label in range(4):  # a bright quarter
            top, left = 8 * (label // 2), 8 * (label % 2)
            images[labels == label, :, top : top + 8, left : left + 8] += 0.5
        return TensorDataset(images, labels)
    if not path.is_file():
        raise SystemExit(f"{path} is no file: expected one made by torch.save")
    data = torch.load(path, weights_only=True)
    if not isinstance(data, dict) or {"images", "labels"} - data.keys() or data["images"].ndim != 4:
        raise SystemExit(f'{path}: expected a dict with "images" of shape [N, C, H, W] and "labels" of shape [N]')
    return TensorDataset(data["images"], data["labels"])


def build_model(channels: int, num_classes: int) -> nn.Sequential:
    """A plain row of layers, as `partition` wants it."""
    layers: list[nn.Module] = []
    for width in (16, 16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(channels, num_classes)
    )


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of tensors, see above")
    parser.add_argument("--epochs", type=int, default=5, help="in all")
    parser.add_argument("--stop-after", type=int, help="epochs after which to stop, with a rate planned for all")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--staleness", help='such as "DSP(1,1,0; 4,2,0)"; default: m_k = K-1-k')
    parser.add_argument("--seed", type=int, default=0, help="the same in every process")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint, written after each epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint of as many processes")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    is_last = rank == num_stages - 1
    data = load_data(args.data)
    images, labels = data.tensors
    num_held_out = len(data) // 6
    train = TensorDataset(images[num_held_out:], labels[num_held_out:])

    torch.manual_seed(args.seed)
    model = build_model(images.shape[1], int(labels.max()) + 1)
    # By time (sample=...) the cut is better, and measured anew in each run: a checkpoint needs the same one.
    block = partition(model, num_stages, by="parameters")[rank]
    optimizer = torch.optim.SGD(block.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    num_updates = args.epochs * -(-len(train) // args.batch_size)
    staleness = Staleness.parse(args.staleness) if args.staleness else None
    with ScheduleDSP(
        (block, rank, num_stages),
        optimizer,
        nn.functional.cross_entropy,
        m=staleness,
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_updates),
        seed=args.seed,
    ) as schedule:
        if args.resume:
            schedule.load(args.resume)
        if is_last:
            print(f"{num_stages} blocks, {schedule.spec}", flush=True)
        first = schedule.num_batches // -(-len(train) // args.batch_size)
        for epoch in range(first, min(args.epochs, args.stop_after or args.epochs)):
            order = torch.Generator().manual_seed(args.seed + epoch)
            loader = DataLoader(train, args.batch_size, shuffle=True, generator=order)
            for x, y in schedule.feed(loader):
                loss = schedule.step(x, target=y)
            output = schedule.eval(images[:num_held_out])  # the batches under way stay so
            if is_last:
                accuracy = (output.argmax(1) == labels[:num_held_out]).double().mean().item()
                print(f"epoch {epoch + 1}: loss {loss.item():.6f}, held out {accuracy:.4f}", flush=True)
            if args.save:
                schedule.save(args.save)
        schedule.flush()  # the last updates of all blocks but the last
        weights = schedule.merged_weights()
        if rank == 0:
            model.load_state_dict(weights)  # under the plain model's own names
            model.eval()
            with torch.no_grad():
                accuracy = (model(images[:num_held_out]).argmax(1) == labels[:num_held_out]).double().mean().item()
            print(f"merged after {schedule.num_batches} updates: held out {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
