"""Scenes to detect things in: items of Fashion-MNIST, tinted, on tiles of photographs.

Training and test scenes share neither a photograph nor an item. They are composed once, which takes some seconds,
and kept in the user's cache.
"""

import os
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from debian import cache_folder
from PIL import Image
from torch import Tensor

from stretto.demo.fashion import load_fashion_mnist
from workloads.tiles import NAMES, decode, load_tiles

SIDE = 64
MAX_ITEMS = 3
CLASSES = ("top", "trousers", "dress", "shoe", "bag")
_CLASS_OF_LABEL = (0, 1, 0, 2, 0, 3, 0, 3, 4, 3)
TEST_PHOTOGRAPHS = ("Aqua", "ColorfulCups", "Dune", "FallenLeaf", "Grey", "LadyBird")
_NUM_TRAIN, _NUM_TEST = 8000, 300
_SIZES = (18, 36)  # pixels of the square that an item of 28x28 is scaled to
_LEAST_INK = 40
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Scenes:
    """What is seen and where."""

    images: Tensor
    """uint8 [N, 3, 64, 64]"""
    boxes: Tensor
    """float32 [N, 3, 4]: left, top, right, bottom in pixels; zeros where there is no item"""
    labels: Tensor
    """int64 [N, 3]: the class, -1 where there is no item"""


@cache
def load_scenes() -> tuple[Scenes, Scenes]:
    """8,000 scenes to train on and 300 to test on; Fashion-MNIST and 141 MB of photographs are fetched at first."""
    folder = cache_folder("scenes")
    kept = folder / f"scenes-{_VERSION}.npz"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = load_fashion_mnist()
        names = [name for name in NAMES if name not in TEST_PHOTOGRAPHS]
        train = compose(found.train_images, found.train_labels, _tiles_of(names), _NUM_TRAIN, seed=0)
        test = compose(found.test_images, found.test_labels, _tiles_of(TEST_PHOTOGRAPHS), _NUM_TEST, seed=1)
        unfinished = folder / f"unfinished-{os.getpid()}.npz"
        np.savez(unfinished, **_named("train", train), **_named("test", test))
        unfinished.rename(kept)
    with np.load(kept) as arrays:
        train, test = (
            Scenes(*(torch.from_numpy(arrays[f"{side}_{part}"]) for part in ("images", "boxes", "labels")))
            for side in ("train", "test")
        )
    return train, test


def compose(items: np.ndarray, labels: np.ndarray, tiles: list[bytes], count: int, seed: int) -> Scenes:
    """Scenes of one to three items (uint8 [N, 28, 28], with Fashion-MNIST's labels) on JPEG tiles.

    Tiles are of at least 64x64. Classes are equally frequent. An item is scaled to a square of 18 to 36 pixels and
    tinted; where it is dark the background shows through. No two of a scene overlap by more than 3 pixels.
    """
    rng = np.random.default_rng(seed)
    classes_of_items = np.array(_CLASS_OF_LABEL)[labels]
    of_class = [np.flatnonzero(classes_of_items == wanted) for wanted in range(len(CLASSES))]
    images = np.empty((count, 3, SIDE, SIDE), np.uint8)
    boxes = np.zeros((count, MAX_ITEMS, 4), np.float32)
    classes = np.full((count, MAX_ITEMS), -1, np.int64)
    for image, of_image, of_classes in zip(images, boxes, classes, strict=True):
        tile = decode(tiles[rng.integers(len(tiles))])
        top, left = (rng.integers(0, side - SIDE + 1) for side in tile.shape[1:])
        canvas = tile[:, top : top + SIDE, left : left + SIDE].astype(np.float32)
        for place in range(rng.integers(1, MAX_ITEMS + 1)):
            wanted = rng.integers(len(CLASSES))
            at = rng.choice(of_class[wanted])
            box = _paste(canvas, items[at], of_image[:place], rng)
            if box is not None:
                of_image[place], of_classes[place] = box, wanted
        image[:] = canvas
    return Scenes(torch.from_numpy(images), torch.from_numpy(boxes), torch.from_numpy(classes))


def _paste(canvas: np.ndarray, item: np.ndarray, others: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Put an item on the canvas in place; its box, or None if no room was found."""
    size = int(rng.integers(_SIZES[0], _SIZES[1] + 1))
    ink = np.asarray(Image.fromarray(item).resize((size, size), Image.Resampling.BILINEAR), np.float32)
    rows, columns = (np.flatnonzero((ink > _LEAST_INK).any(axis)) for axis in (1, 0))
    tint = rng.uniform(0.3, 1.2, (3, 1, 1))
    for _ in range(10):
        top, left = rng.integers(0, SIDE - size + 1, 2)
        box = np.array([columns[0] + left, rows[0] + top, columns[-1] + 1 + left, rows[-1] + 1 + top], np.float32)
        overlaps = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
        if not (overlaps > 3).all(1).any():
            under = canvas[:, top : top + size, left : left + size]
            opacity = np.clip(ink / _LEAST_INK, 0, 1)
            under += opacity * (np.clip(ink * tint, 0, 255) - under)
            return box
    return None


def _tiles_of(names: list[str] | tuple[str, ...]) -> list[bytes]:
    tiles = load_tiles()
    return [tile for name in names for tile in tiles[name]]


def _named(side: str, scenes: Scenes) -> dict[str, np.ndarray]:
    return {f"{side}_{part}": getattr(scenes, part).numpy() for part in ("images", "boxes", "labels")}
