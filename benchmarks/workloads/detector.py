"""A single-shot detector (SSD) on scenes of photographs and items of Fashion-MNIST, with crops and mirroring.

8,000 scenes of 64x64 to train on, 300 to test on, of other photographs and other items (scenes.py); five classes.
The net has two maps of 8x8 and 4x4 cells with three anchors in each (boxes.py). The metric is COCO's mAP by
pycocotools: torchmetrics needs torchvision, which comes with a torch of its own.

Target: an mAP of 0.2, in the steep part of the curve, before the fall of the rate: without echo and tuned it is
reached after about 5,400 of the 20,000 fresh examples, and training ends near 0.43. The whole budget takes 25 s of
one core.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))  # `stretto study` runs this file by its path

from accuracy_models import Residual

from stretto.study import MakeLoader, Settings, Study
from workloads.boxes import RATIOS, MeanAveragePrecision, detect, make_anchors, multibox_loss
from workloads.common import Evaluate, Rows, fresh_batches, train_updates
from workloads.scenes import CLASSES, SIDE, Scenes, load_scenes

Batch = tuple[Tensor, Tensor, Tensor]
LEAST_SHARE = 0.75
"""The smallest part of a scene's side that a crop keeps."""
EVALUATE_EVERY = 960
WARM_UP = 50  # updates
_WIDTH = 12


def load_data() -> tuple[Scenes, Scenes]:
    """Scenes to train on and to test on."""
    return load_scenes()


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Crop each scene to a square of at least 75 % of its side, scale it up again, and mirror half of them.

    images uint8 [B, 3, S, S], boxes [B, M, 4], labels [B, M]. Boxes are cut at the edge; one whose centre is cut
    off is no item any more.
    """
    images, boxes, labels = batch
    count, side = len(images), images.shape[-1]
    share = LEAST_SHARE + (1 - LEAST_SHARE) * torch.rand(count, generator=generator)
    corner = torch.rand(count, 2, generator=generator) * (1 - share).unsqueeze(1)  # x and y, in sides
    is_mirrored = torch.rand(count, generator=generator) < 0.5
    along = torch.where(is_mirrored, -share, share)
    zeros = torch.zeros(count)
    middle = 2 * corner + share.unsqueeze(1) - 1
    theta = torch.stack([along, zeros, middle[:, 0], zeros, share, middle[:, 1]], 1).view(count, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    cropped = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)

    origin = (corner * side).repeat(1, 2).unsqueeze(1)
    moved = (boxes - origin) / share.view(-1, 1, 1)
    left, top, right, bottom = moved.unbind(-1)
    mirrored = torch.stack([side - right, top, side - left, bottom], -1)
    moved = torch.where(is_mirrored.view(-1, 1, 1), mirrored, moved)
    centre = (moved[..., :2] + moved[..., 2:]) / 2
    is_inside = ((centre > 0) & (centre < side)).all(-1) & (labels >= 0)
    moved = (moved.clamp(0, side) * is_inside.unsqueeze(-1)).contiguous()
    return cropped.round_().to(torch.uint8), moved, torch.where(is_inside, labels, -1)


class Detector(nn.Module):
    """uint8 [B, 3, 64, 64] -> scores [B, A, classes + 1] and offsets [B, A, 4]."""

    def __init__(self) -> None:
        super().__init__()
        width = _WIDTH
        stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.near = nn.Sequential(stem, Residual(width, 2 * width), Residual(2 * width, 4 * width))
        self.far = Residual(4 * width, 8 * width)
        self.heads = nn.ModuleList(
            nn.Conv2d(channels, len(RATIOS) * (len(CLASSES) + 5), 3, padding=1)
            for channels in (4 * width, 8 * width)
        )
        self.register_buffer("anchors", make_anchors(SIDE, strides=(8, 16), sizes=(20, 32)))
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Score and place every anchor."""
        x = images.float().sub_(100).div_(60).contiguous(memory_format=torch.channels_last)
        near = self.near(x)
        maps = [head(of) for head, of in zip(self.heads, (near, self.far(near)), strict=True)]
        said = torch.cat([m.permute(0, 2, 3, 1).reshape(len(x), -1, len(CLASSES) + 5) for m in maps], 1)
        return said[..., :-4], said[..., -4:]


def train(settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[Evaluate | None]:
    """Momentum of 0.9, weight decay of 5e-4; evaluates COCO's mAP on the test scenes, from 0 to 1."""
    torch.manual_seed(seed)
    (scenes, test), model = load_data(), Detector()
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, momentum=0.9, weight_decay=5e-4)
    mean_average_precision = MeanAveragePrecision(test.boxes, test.labels, len(CLASSES))

    def loss_of(batch: Batch) -> Tensor:
        images, boxes, labels = batch
        return multibox_loss(model.anchors, *model(images), boxes, labels)

    def evaluate() -> float:
        return mean_average_precision(detect(model.anchors, *model(test.images)))

    dataset = Rows(scenes.images, scenes.boxes, scenes.labels)
    batches = make_loader(fresh_batches(dataset, settings.batch_size), augment)
    return train_updates(settings, batches, model, optimizer, loss_of, evaluate, EVALUATE_EVERY, WARM_UP)


study = Study(
    train,
    metric="test mAP",
    target=0.2,
    batch_size=32,
    max_fresh_examples=20_000,
    lr=(0.003, 0.03),
)
