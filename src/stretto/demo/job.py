"""The training job: a small convolutional net on Fashion-MNIST, trained until it reaches a test accuracy."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

Batch = tuple[Tensor, Tensor]

SHIFT = 2  # pixels an image may move each way


class Augment:
    """Shifts each image by up to two pixels each way and mirrors half of them: a new draw at every call.

    Its random numbers come from a generator of its own, so that all conditions can be given the same seeds.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch: Batch) -> Batch:
        """Augment (images uint8 [B, 1, H, W], labels int64 [B])."""
        images, labels = batch
        count, _, height, width = images.shape
        generator = self._generator
        dy, dx = torch.randint(0, 2 * SHIFT + 1, (2, count, 1, 1), generator=generator)
        mirrored = torch.rand(count, 1, 1, generator=generator) < 0.5
        rows = dy + torch.arange(height).view(1, -1, 1)
        across = torch.arange(width).view(1, 1, -1).expand(count, 1, -1)
        columns = dx + torch.where(mirrored, width - 1 - across, across)
        padded = F.pad(images, (SHIFT, SHIFT, SHIFT, SHIFT))
        at = torch.arange(count).view(-1, 1, 1)
        return padded[at, 0, rows, columns].unsqueeze(1), labels


def make_model(seed: int) -> nn.Module:
    """A net of two convolutions with about 21,000 parameters; the seed decides its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*_block(1, 16), *_block(16, 32), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


def normalise(images: Tensor) -> Tensor:
    """Images uint8 to float32 around zero."""
    return images.float().sub_(73.0).div_(90.0)


class Trainer:
    """A model with its optimizer. The learning rate is one and the same in all conditions."""

    def __init__(self, seed: int, learning_rate: float = 0.005) -> None:
        self.model = make_model(seed)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate, momentum=0.9, nesterov=True)

    def step(self, batch: Batch) -> None:
        """One update on (images uint8 [B, 1, H, W], labels int64 [B])."""
        images, labels = batch
        self.model.train()
        loss = F.cross_entropy(self.model(normalise(images)), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Percent of images [N, 1, H, W] classified right."""
        self.model.eval()
        with torch.inference_mode():
            outputs = [self.model(normalise(some)) for some in torch.split(images, 1000)]
            right = int((torch.cat(outputs).argmax(1) == labels).sum())
        return 100 * right / len(labels)


class CollateAndAugment:
    """A DataLoader's `collate_fn` that augments each fresh batch once, with random numbers of the worker's seed."""

    def __init__(self) -> None:
        self._augment: Augment | None = None

    def __call__(self, examples: list[tuple[Tensor, int]]) -> Batch:
        """Stack examples and augment them."""
        if self._augment is None:
            self._augment = Augment(torch.initial_seed())
        images, labels = default_collate(examples)
        return self._augment((images, labels))
