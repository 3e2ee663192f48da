"""A study to run on your own training: how many fresh examples it needs to a target, without echo and with it.

    stretto study examples/study.py --factors 2,4 --processes 2

Handwritten digits of 8 x 8 pixels, from scikit-learn; each is shifted by up to a pixel for each use. A run takes a
second or two.
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.study import MakeLoader, Settings, Study
from stretto.study.study import Value

NUM_TRAIN = 1200
DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.images, dtype=torch.float32).unsqueeze(1) / 16
LABELS = torch.tensor(DIGITS.target)
Batch = list[torch.Tensor]


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Shift each image of a batch by up to a pixel each way."""
    images, labels = batch
    moves = torch.randint(-1, 2, (len(images), 2), generator=generator).tolist()
    shifted = [image.roll((dy, dx), (1, 2)) for image, (dy, dx) in zip(images, moves, strict=True)]
    return [torch.stack(shifted), labels]


def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[Value]:
    """Train a small net from scratch; yields once after each update."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def accuracy() -> float:
        """Of the digits that were held out, in percent."""
        right = model(IMAGES[NUM_TRAIN:]).argmax(1) == LABELS[NUM_TRAIN:]
        return 100 * right.float().mean().item()

    data = TensorDataset(IMAGES[:NUM_TRAIN], LABELS[:NUM_TRAIN])
    fresh = DataLoader(data, settings.batch_size, shuffle=True, drop_last=True)
    for update, (images, labels) in enumerate(make_loader(fresh, augment)):  # without end
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(update)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield accuracy if (update + 1) % 10 == 0 else None  # the study calls it, and does not count its time


study = Study(
    train,
    metric="test accuracy, %",
    target=92.0,
    batch_size=32,
    max_fresh_examples=20_000,  # a run that has not reached the target by then has missed it
    lr=(0.005, 0.5),
    buffer_batches=8,
)
