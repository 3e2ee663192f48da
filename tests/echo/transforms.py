"""Small transforms with the protocols of torchvision, MONAI and albumentations, and the latters' generators."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn


class Add:
    def __init__(self, what: int) -> None:
        self.what = what

    def __call__(self, value: Any) -> Any:
        return value + self.what


class Times(Add):
    def __call__(self, value: Any) -> Any:
        return value * self.what


class AddNoise:
    """Draws from all three global states."""

    def __call__(self, value: Any) -> Any:
        return value + torch.rand(3) + random.random() + float(np.random.normal())


class Compose:
    """torchvision's, first version."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, img: Any) -> Any:
        for t in self.transforms:
            img = t(img)
        return img


class Pipeline(Compose):
    """A Compose as users subclass it."""

    def __init__(self, size: int) -> None:
        super().__init__([Add(size), Times(size)])
        self.size = size


class Sometimes(Compose):
    def __call__(self, img: Any) -> Any:
        return super().__call__(img) if random.random() < 0.5 else img


class ModuleCompose(nn.Module):
    """torchvision's, second version."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, *inputs: Any) -> Any:
        needs_unpacking = len(inputs) > 1
        for transform in self.transforms:
            outputs = transform(*inputs)
            inputs = outputs if needs_unpacking else (outputs,)
        return outputs


ModuleCompose.__name__ = ModuleCompose.__qualname__ = (
    "Compose"  # as there; two of a name cannot stand in one module
)


class Both:
    """A joint transform."""

    def __call__(self, image: Any, target: Any) -> Any:
        return image + 1, target * 10


class Standard:
    """torchvision's StandardTransform."""

    def __init__(self, transform: Any, target_transform: Any) -> None:
        self.transform = transform
        self.target_transform = target_transform

    def __call__(self, image: Any, target: Any) -> Any:
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


class Randomizable:
    """MONAI's: a generator of its own, the class's until one is set."""

    R = np.random.RandomState()

    def set_random_state(self, seed: int | None = None, state: np.random.RandomState | None = None) -> None:
        self.R = np.random.RandomState(seed) if state is None else state


class RandShift(Randomizable):
    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "image": item["image"] + self.R.normal()}


class Crops(Randomizable):
    """One item becomes several."""

    def __call__(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**item, "image": item["image"] + self.R.randint(100)} for _ in range(2)]


class MonaiCompose(Randomizable):
    def __init__(self, transforms: Sequence[Any], *, map_items: bool = True, lazy: bool | None = False) -> None:
        self.transforms = tuple(transforms)
        self.map_items = map_items
        self.unpack_items = False
        self.lazy = lazy

    def __call__(self, item: Any, start: int = 0, end: int | None = None, threading: bool = False) -> Any:
        for transform in self.transforms[start:end]:
            several = isinstance(item, list) and self.map_items
            item = [transform(one) for one in item] if several else transform(item)
        return item


MonaiCompose.__name__ = "Compose"


class Basic:
    """albumentations': two generators, p, named values."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p
        self.set_random_seed(None)

    def set_random_seed(self, seed: int | None) -> None:
        self.set_random_state(np.random.default_rng(seed), random.Random(seed))

    def set_random_state(self, random_generator: np.random.Generator, py_random: random.Random) -> None:
        self.random_generator = random_generator
        self.py_random = py_random

    def __call__(self, **data: Any) -> dict[str, Any]:
        if self.py_random.random() >= self.p:
            return data
        return {key: self.apply(value) if key in ("image", "masks") else value for key, value in data.items()}

    def apply(self, image: Any) -> Any:
        return image[::-1]


class VerticalFlip(Basic):
    pass


class HorizontalFlip(Basic):
    def apply(self, image: Any) -> Any:
        return image[..., ::-1]


class Noise(Basic):
    def apply(self, image: Any) -> Any:
        return image + self.random_generator.normal(size=image.shape)


class AlbuCompose(Basic):
    def __init__(self, transforms: list[Any], p: float = 1.0, processors: tuple[str, ...] = ()) -> None:
        self.transforms = transforms
        super().__init__(p)
        self.processors = processors
        self.save_applied_params = self.replay_mode = False
        self.main_compose = True
        self._masks_was_list = False
        for nested in transforms:
            if isinstance(nested, AlbuCompose):
                nested.main_compose = False

    def set_random_seed(self, seed: int | None) -> None:
        super().set_random_seed(seed)
        for transform in self.transforms:
            transform.set_random_seed(seed)

    def set_random_state(self, random_generator: np.random.Generator, py_random: random.Random) -> None:
        super().set_random_state(random_generator, py_random)
        for transform in self.transforms:
            transform.set_random_state(random_generator, py_random)

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> dict[str, Any]:
        if not (force_apply or self.py_random.random() < self.p):
            return data
        self.preprocess(data)
        for transform in self.transforms:
            data = transform(**data)
        if self.main_compose and self._masks_was_list:
            data["masks"] = list(data["masks"])
        return data

    def preprocess(self, data: dict[str, Any]) -> None:
        if not isinstance(data["image"], np.ndarray):
            raise TypeError("image must be numpy array type")
        if "masks" in data:
            self._masks_was_list = isinstance(data["masks"], list)
            data["masks"] = np.stack(data["masks"])


AlbuCompose.__name__ = "Compose"
