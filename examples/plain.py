"""A plain training script, which knows nothing of stretto: to be measured and echoed from outside.

    stretto run --html report.html -- python examples/plain.py --data PHOTOS
    stretto run --echo auto -- python examples/plain.py --data PHOTOS
    stretto prove --echo 3 --metric 'accuracy ([0-9.]+)' -- python examples/plain.py --data PHOTOS

PHOTOS has one folder of JPEG files for each class; every eighth file is kept for the test. `--delay-ms` has each
read wait, as one from an object store does.
"""

import argparse
import time
from pathlib import Path

import albumentations as A
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 64
TRAIN = A.Compose([A.RandomResizedCrop((SIZE, SIZE), scale=(0.4, 1.0)), A.HorizontalFlip(), A.Normalize()])
TEST = A.Compose([A.Resize(SIZE, SIZE), A.Normalize()])


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files and the numbers of their classes."""

    def __init__(self, files: list[tuple[Path, int]], transform: A.Compose, delay_s: float) -> None:
        self.files = files
        self.transform = transform
        self.delay_s = delay_s

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        time.sleep(self.delay_s)
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        pixels = self.transform(image=pixels)["image"]
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, 2, 0))), label


def make_model(num_classes: int) -> nn.Module:
    """Three convolutions, 64 x 64 to 8 x 8."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, int]]) -> float:
    """Right answers, in percent."""
    model.eval()
    right = [model(images).argmax(1) == labels for images, labels in loader]
    model.train()
    return 100 * torch.cat(right).float().mean().item()


def main() -> None:
    """Parse the arguments, train, and test after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of JPEG files for each class")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    torch.manual_seed(0)
    paths = sorted(args.data.glob("*/*.jpg"))
    classes = sorted({path.parent.name for path in paths})
    files = [(path, classes.index(path.parent.name)) for path in paths]
    delay_s = args.delay_ms / 1e3
    test = DataLoader(Photos(files[::8], TEST, delay_s), args.batch_size, num_workers=args.workers)
    train = DataLoader(
        Photos([file for at, file in enumerate(files) if at % 8], TRAIN, delay_s),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
    )
    if len(train) == 0:
        raise SystemExit(f"{args.data} has {len(files)} files: expected more than a batch of {args.batch_size}")
    model = make_model(len(classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train))
    for epoch in range(args.epochs):
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy(model, test):.1f}")


if __name__ == "__main__":
    main()
