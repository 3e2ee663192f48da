"""Train a small conv net on JPEG files; each file is read and decoded once an epoch and used `--factor` times.

    python examples/images.py --data PHOTOS --epochs 3 --factor 3 --workers 2 --compare

PHOTOS has one folder of files for each class. The stages are read, decode (Pillow), augment (albumentations): what
"decode" returns stays in the worker's memory, and "augment" runs anew for each use. `--compare` trains without echo
too, for as many updates.
"""

import argparse
import io
import time
from pathlib import Path

import albumentations as A
import numpy as np
import torch
from PIL import Image
from torch import nn

import stretto

SIZE = 64
AUGMENT = A.Compose(
    [A.RandomResizedCrop((SIZE, SIZE), scale=(0.4, 1.0)), A.HorizontalFlip(), A.ColorJitter(), A.Normalize()]
)


def read(item: tuple[Path, int]) -> tuple[bytes, int]:
    """The bytes of a file."""
    path, label = item
    return path.read_bytes(), label


def decode(item: tuple[bytes, int]) -> tuple[np.ndarray, int]:
    """Decode, and shrink to what the crops need: this is what stays in memory."""
    data, label = item
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (2 * SIZE, 2 * SIZE))  # the JPEG decoder can shrink as it decodes
        small = image.convert("RGB")
    small.thumbnail((2 * SIZE, 2 * SIZE))
    return np.asarray(small), label


def augment(item: tuple[np.ndarray, int]) -> tuple[torch.Tensor, int]:
    """A random crop, flip and colours: another result for each use."""
    image, label = item
    image = AUGMENT(image=image)["image"]
    return torch.from_numpy(image.transpose(2, 0, 1).copy()), label


def find_files(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Each file with the number of its class, and the names of the classes."""
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    classes = sorted({path.parent.name for path in paths})
    if len(classes) < 2:
        raise SystemExit(
            f"{folder} has JPEG files of {len(classes)} classes: expected {folder}/CLASS/NAME.jpg, 2 or more"
        )
    return [(path, classes.index(path.parent.name)) for path in paths], classes


def make_model(num_classes: int) -> nn.Module:
    """Four convolutions, 64 x 64 to 4 x 4."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def train(args: argparse.Namespace, factor: float | str, num_updates: int | None) -> int:
    """Train for `args.epochs` epochs, or for `num_updates` updates; return how many there were."""
    files, classes = find_files(args.data)
    torch.manual_seed(args.seed)
    model = make_model(len(classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    loader = stretto.EchoDataLoader(
        stretto.StagedDataset(files, read=read, decode=decode, augment=augment),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        factor=factor,
        echo_after="decode",
        seed=args.seed,
        on_error="skip",  # a broken file is left out and counted
    )
    if len(files) < args.batch_size * max(1, args.workers):
        raise SystemExit(
            f"{len(files)} files: expected a batch of {args.batch_size} for each of {args.workers} workers"
        )
    start, epoch, update = time.perf_counter(), 0, 0
    while update < num_updates if num_updates else epoch < args.epochs:
        losses = []
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            update += 1
            if update == num_updates:
                break
        epoch += 1
        print(f"factor {factor}, epoch {epoch}: loss {np.mean(losses):.4f} after {update} updates")
    stats = loader.stats()
    print(
        f"factor {factor}: {stats.reads} examples read, {stats.skipped} skipped, {stats.uses} used in "
        f"{stats.updates} updates, {time.perf_counter() - start:.1f} s, AU {stats.au_percent:.0f} %"
    )
    return update


def factor_of(text: str) -> float | str:
    """The argument of --factor."""
    return text if text == "auto" else float(text)


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of JPEG files for each class")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the files (with echo)")
    parser.add_argument("--factor", type=factor_of, default=3.0, help='uses of each decoded image, or "auto"')
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="train without echo too, for as many updates")
    args = parser.parse_args()
    num_updates = train(args, args.factor, None)
    if args.compare:
        train(args, 1.0, num_updates)


if __name__ == "__main__":
    main()
