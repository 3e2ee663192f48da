"""The small ResNet of the two image workloads, and how it is trained."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from accuracy_models import Residual
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.study import MakeLoader, Settings
from workloads.common import Evaluate, fresh_batches, percent_right, train_updates


class Normalise(nn.Module):
    """uint8 [B, C, H, W] -> float32 around zero, channels last."""

    def __init__(self, middle: float, spread: float) -> None:
        super().__init__()
        self.middle, self.spread = middle, spread

    def forward(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.middle).div_(self.spread).contiguous(memory_format=torch.channels_last)


def make_model(normalise: Normalise, stem: nn.Conv2d, num_classes: int) -> nn.Module:
    """A stem to 16 channels and three residual blocks to 64; weights from torch's present random state."""
    model = nn.Sequential(
        normalise,
        stem,
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        Residual(16, 16),
        Residual(16, 32),
        Residual(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
    return model.to(memory_format=torch.channels_last)


def train_on(
    dataset: Dataset[Any],
    test_images: Tensor,
    test_labels: Tensor,
    augment: Any,
    model: nn.Module,
    settings: Settings,
    make_loader: MakeLoader,
    evaluate_every: int,
) -> Iterator[Evaluate | None]:
    """Nesterov momentum of 0.9, weight decay of 5e-4; evaluates percent right of the test images."""
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, 0.9, weight_decay=5e-4, nesterov=True)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate() -> float:
        return percent_right(model, test_images, test_labels)

    batches = make_loader(fresh_batches(dataset, settings.batch_size), augment)
    return train_updates(settings, batches, model, optimizer, loss_of, evaluate, evaluate_every)
