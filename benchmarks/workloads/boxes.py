"""Anchors, the loss of a single-shot detector, its detections and their mean average precision.

After Liu et al., "SSD: Single Shot MultiBox Detector", arXiv 1512.02325. Boxes are left, top, right, bottom.
"""

import contextlib
import io
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

RATIOS = (0.6, 1.0, 1.6)  # width / height
_VARIANCES = (0.1, 0.2)
_POSITIVE_IOU = 0.5
_NEGATIVES = 3  # to each positive anchor


def make_anchors(side: int, strides: Sequence[int], sizes: Sequence[float]) -> Tensor:
    """float32 [A, 4]: at each cell of each map one of each ratio, in the order of [height, width, ratio]."""
    anchors = []
    for stride, size in zip(strides, sizes, strict=True):
        centres = (torch.arange(side // stride) + 0.5) * stride
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        for_cell = [(size * ratio**0.5, size / ratio**0.5) for ratio in RATIOS]
        halves = torch.tensor(for_cell) / 2
        centre = torch.stack([x, y], -1).view(-1, 1, 2)
        anchors.append(torch.cat([centre - halves, centre + halves], -1).view(-1, 4))
    return torch.cat(anchors)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of [..., N, 4] and [..., M, 4]: [..., N, M]."""
    corner = torch.maximum(a[..., :, None, :2], b[..., None, :, :2])
    opposite = torch.minimum(a[..., :, None, 2:], b[..., None, :, 2:])
    common = (opposite - corner).clamp_min(0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (a, b)]
    return common / (areas[0][..., :, None] + areas[1][..., None, :] - common).clamp_min(1e-6)


def match(anchors: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """For each anchor the box it stands for and its class + 1, or 0 for the background.

    boxes [B, M, 4], labels [B, M] with -1 for none -> [B, A, 4], int64 [B, A]. An anchor stands for the box it
    overlaps most, if by half; the anchor that overlaps a box most stands for it in any case.
    """
    overlaps = iou(anchors, boxes).masked_fill(labels[:, None, :] < 0, -1)
    best, which = overlaps.max(2)
    for at in range(boxes.shape[1]):
        anchor = overlaps[:, :, at].argmax(1, keepdim=True)
        there = labels[:, at, None] >= 0
        which.scatter_(1, anchor, torch.where(there, at, which.gather(1, anchor)))
        best.scatter_(1, anchor, torch.where(there, 1.0, best.gather(1, anchor)))
    matched = boxes.gather(1, which.unsqueeze(-1).expand(-1, -1, 4))
    return matched, torch.where(best >= _POSITIVE_IOU, labels.gather(1, which) + 1, 0)


def offsets(anchors: Tensor, boxes: Tensor) -> Tensor:
    """What the net is to say of `boxes` [..., A, 4]: shifts and logarithms of scales, over their variances."""
    size, box_size = anchors[:, 2:] - anchors[:, :2], boxes[..., 2:] - boxes[..., :2]
    shift = (boxes[..., :2] + boxes[..., 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / size
    return torch.cat([shift / _VARIANCES[0], (box_size / size).clamp_min(1e-3).log() / _VARIANCES[1]], -1)


def from_offsets(anchors: Tensor, said: Tensor) -> Tensor:
    """The boxes that the net says: the inverse of `offsets`."""
    size = anchors[:, 2:] - anchors[:, :2]
    centre = (anchors[:, :2] + anchors[:, 2:]) / 2 + said[..., :2] * _VARIANCES[0] * size
    half = (said[..., 2:] * _VARIANCES[1]).clamp_max(4).exp() * size / 2
    return torch.cat([centre - half, centre + half], -1)


def multibox_loss(anchors: Tensor, scores: Tensor, said: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of scores [B, A, C + 1] over positives and the hardest negatives, plus smooth L1 of offsets."""
    matched, classes = match(anchors, boxes, labels)
    is_positive = classes > 0
    num_positive = is_positive.sum(1, keepdim=True)
    entropy = F.cross_entropy(scores.flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
    of_negatives = entropy.detach().masked_fill(is_positive, -1)
    rank = of_negatives.argsort(1, descending=True).argsort(1)
    is_used = is_positive | (rank < _NEGATIVES * num_positive)
    distance = F.smooth_l1_loss(said[is_positive], offsets(anchors, matched)[is_positive], reduction="sum")
    return (entropy[is_used].sum() + distance) / num_positive.sum().clamp_min(1)


def detect(anchors: Tensor, scores: Tensor, said: Tensor, num_candidates: int = 24) -> Tensor:
    """Rows of image, left, top, width, height, score, class [D, 7]: what non-maximum suppression leaves.

    The candidates of an image are the pairs of anchor and class of the highest scores. One is dropped that overlaps
    a better one of its class by more than 0.45.
    """
    count, _, num_classes = scores.shape[0], scores.shape[1], scores.shape[2] - 1
    best, at = scores.softmax(-1)[..., 1:].flatten(1).topk(num_candidates)
    anchor, label = at // num_classes, at % num_classes
    boxes = from_offsets(anchors, said).gather(1, anchor.unsqueeze(-1).expand(-1, -1, 4))
    rivals = (iou(boxes, boxes) > 0.45) & (label[:, :, None] == label[:, None, :])
    is_kept = best > 0.05
    for place in range(num_candidates - 1):
        is_kept[:, place + 1 :] &= ~(rivals[:, place, place + 1 :] & is_kept[:, place, None])
    image = torch.arange(count).view(-1, 1).expand_as(label)
    rows = torch.cat([boxes[..., :2], boxes[..., 2:] - boxes[..., :2]], -1)
    rows = torch.cat([image.unsqueeze(-1), rows, best.unsqueeze(-1), label.unsqueeze(-1)], -1)
    return rows[is_kept]


class MeanAveragePrecision:
    """COCO's mAP (mean over IoU .50 to .95 and classes) of one set of scenes, by pycocotools."""

    def __init__(self, boxes: Tensor, labels: Tensor, num_classes: int) -> None:
        """boxes [N, M, 4] and labels [N, M], -1 for none."""
        annotations = []
        for image, item in (labels >= 0).nonzero().tolist():
            left, top, right, bottom = boxes[image, item].tolist()
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": int(labels[image, item]),
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": 0,
                }
            )
        self._truth = COCO()
        self._truth.dataset = {
            "images": [{"id": image} for image in range(len(labels))],
            "categories": [{"id": label} for label in range(num_classes)],
            "annotations": annotations,
        }
        with contextlib.redirect_stdout(io.StringIO()):
            self._truth.createIndex()

    def __call__(self, detections: Tensor) -> float:
        """From the rows of `detect`, a number from 0 to 1."""
        if not len(detections):
            return 0.0
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it goes
            found = self._truth.loadRes(detections.numpy().astype(np.float64))
            evaluation = COCOeval(self._truth, found, "bbox")
            evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
            evaluation.params.maxDets = [100]
            evaluation.evaluate()
            evaluation.accumulate()
        precision = evaluation.eval["precision"]
        return float(precision[precision >= 0].mean())
