"""KeyedRandomness: every random number follows from the words given to seed()."""

import functools
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stretto import StagedDataset
from stretto.echo.generators import HeldGenerators
from stretto.echo.randomness import KeyedRandomness
from tests.echo.transforms import (
    AddNoise,
    AlbuCompose,
    Compose,
    Crops,
    HorizontalFlip,
    MonaiCompose,
    Noise,
    RandShift,
    VerticalFlip,
)

Function = Callable[[Any], Any]
GENERATOR = np.random.default_rng()
ALBUMENTATIONS = AlbuCompose([HorizontalFlip(), Noise(1)])


def uses_a_global(value: Any) -> Any:
    return value + GENERATOR.normal()


def uses_a_global_transform(value: Any) -> Any:
    return ALBUMENTATIONS(image=value.numpy())["image"]


def calls_another(value: Any) -> Any:
    return [uses_a_global(value) for _ in range(2)]


def takes_a_generator(value: Any, generator: Any) -> Any:
    return value + generator.random()


class Holder:
    def __init__(self, generator: Any, draw: str, *args: Any) -> None:
        self.held = [{"generator": generator}]
        self._draw = draw
        self._args = args

    def __call__(self, value: Any) -> Any:
        return value + float(getattr(self.held[0]["generator"], self._draw)(*self._args))

    def method(self, value: Any) -> Any:
        return self(value)


@dataclass(slots=True)
class Slotted:
    generator: random.Random

    def __call__(self, value: Any) -> Any:
        return value + self.generator.random()


class TorchHolder:
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, value: Any) -> Any:
        return value + torch.rand(3, generator=self.generator)


def fails(value: Any) -> Any:
    raise KeyError(value)


def closure() -> Function:
    generator = random.Random()
    return lambda value: value + generator.random()


def monai(value: Any, transform: Any) -> Any:
    return [item["image"] for item in transform({"image": value})]


def functions() -> dict[str, Function]:
    return {
        "global states": AddNoise(),
        "albumentations": uses_a_global_transform,
        "monai": functools.partial(monai, transform=MonaiCompose([Crops(), RandShift()])),
        "monai, not set up": functools.partial(monai, transform=Compose([Crops()])),
        "global": uses_a_global,
        "global of another function": calls_another,
        "partial": functools.partial(takes_a_generator, generator=random.Random()),
        "closure": closure(),
        "Generator": Holder(np.random.default_rng(), "normal"),
        "Generator of other bits": Holder(np.random.Generator(np.random.Philox()), "normal"),
        "RandomState": Holder(np.random.RandomState(), "normal"),
        "RandomState of other bits": Holder(np.random.RandomState(np.random.SFC64()), "normal"),
        "Random": Holder(random.Random(), "gauss", 0, 1).method,
        "torch": TorchHolder(),
        "slots": Slotted(random.Random()),
        "nested": Compose([Compose([Holder(np.random.default_rng(), "normal")])]),
    }


def numbers(value: Any) -> list[float]:
    return [float(number) for number in np.ravel(np.asarray(value))]


def draw(randomness: KeyedRandomness, function: Function, *words: int) -> list[float]:
    randomness.seed(*words)
    return numbers(function(torch.arange(3.0)))


@pytest.mark.parametrize("name", list(functions()))
def test_equal_words_give_equal_examples_in_any_order_and_others_give_others(name: str) -> None:
    function = functions()[name]
    orders = [(0, 1), (0, 2), (1, 1), (2, 1)]
    with KeyedRandomness(function) as randomness:
        first = {words: draw(randomness, function, *words) for words in orders}
        again = {words: draw(randomness, function, *words) for words in reversed(orders)}
    assert first == again
    assert len({str(values) for values in first.values()}) == len(orders)
    other = functions()[name]
    with KeyedRandomness(other) as randomness:
        assert {words: draw(randomness, other, *words) for words in orders} == first


def global_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


def test_the_global_states_are_restored_exactly_also_after_an_error() -> None:
    np.random.normal()  # leaves the second of a pair behind, which belongs to the state
    before = global_states()
    randomness = KeyedRandomness()
    with randomness:
        randomness.seed(1)
        np.random.normal()
        inside = global_states()
        with KeyedRandomness() as other:
            other.seed(2)
        assert global_states() == inside
    assert global_states() == before
    with pytest.raises(KeyError), randomness:
        draw(randomness, fails, 1)
    assert global_states() == before


def test_the_three_global_states_draw_different_numbers() -> None:
    with KeyedRandomness() as randomness:
        randomness.seed(3)
        state = np.random.get_state()[1][:5].tolist()
        assert torch.get_rng_state().view(torch.int64)[3:8].tolist() != state
        assert list(random.getstate()[1][:5]) != state
        draws = [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]
        assert len({round(value, 6) for value in draws}) == 3


def test_two_generators_are_seeded_differently() -> None:
    pair = [Holder(random.Random(), "random"), Holder(random.Random(), "random")]
    with KeyedRandomness(*pair) as randomness:
        randomness.seed(1)
        assert pair[0](0) != pair[1](0)


def test_members_of_albumentations_compose_are_independent() -> None:
    transform = AlbuCompose([HorizontalFlip(), VerticalFlip()])
    image = np.arange(4).reshape(2, 2)
    with KeyedRandomness(transform) as randomness:
        seen = []
        for use in range(400):
            randomness.seed(0, use)
            seen.append(str(transform(image=image)["image"].ravel().tolist()))
    counts = [seen.count(flipped) for flipped in set(seen)]
    assert len(counts) == 4
    assert min(counts) > 70


def test_loaders_over_the_same_transforms_do_not_disturb_each_other() -> None:
    function = uses_a_global_transform
    with KeyedRandomness(function) as first:
        expected = draw(first, function, 1)
    with KeyedRandomness(function) as second:
        assert draw(second, function, 1) == expected
    with first:
        assert draw(first, function, 1) == expected


def test_stages_of_a_wrapped_data_set_are_searched() -> None:
    dataset = SimpleDataset(MonaiCompose([Crops(), RandShift()]), np.random.default_rng())
    stages = StagedDataset.wrap(dataset)
    with KeyedRandomness(*stages.stages.values()) as randomness:
        randomness.seed(5)
        first = [float(item["image"]) for item in stages[0]]
        randomness.seed(6)
        other = [float(item["image"]) for item in stages[0]]
        randomness.seed(5)
        assert [float(item["image"]) for item in stages[0]] == first != other


class SimpleDataset:
    def __init__(self, transform: Any, generator: np.random.Generator) -> None:
        self.transform = transform
        self.generator = generator

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.transform({"image": index + self.generator.random()})


def test_what_pickling_gives_back_draws_the_same() -> None:
    function = functools.partial(monai, transform=MonaiCompose([Crops(), RandShift()]))
    with KeyedRandomness(function, Slotted(random.Random())) as randomness:
        expected = draw(randomness, function, 1, 2)
        sent = pickle.loads(pickle.dumps((randomness, function)))
    with sent[0] as received:
        assert draw(received, sent[1], 1, 2) == expected


def test_the_global_generators_are_not_held_and_large_lists_are_not_searched() -> None:
    def uses_globals(value: Any) -> Any:
        return value + random.random() + np.random.random() + draw_one()

    draw_one = random.random
    assert len(HeldGenerators([uses_globals, AddNoise(), np.random.normal])) == 0
    large = SimpleNamespace(items=[random.Random()] * 1001)
    assert len(HeldGenerators([Holder(large, "items")])) == 0


def test_a_generator_held_twice_is_seeded_once() -> None:
    generator = random.Random()
    assert len(HeldGenerators([Slotted(generator), Slotted(generator), closure()])) == 2


def test_real_albumentations_and_its_equal_flips() -> None:
    a = pytest.importorskip("albumentations")
    transform = a.Compose([a.HorizontalFlip(), a.VerticalFlip(), a.GaussNoise(p=0.5)])
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)

    def augment(_: Any) -> Any:
        return transform(image=image)["image"]

    with KeyedRandomness(augment) as randomness:
        first = [draw(randomness, augment, 0, use) for use in range(40)]
        assert [draw(randomness, augment, 0, use) for use in range(40)] == first
    assert len({str(values) for values in first}) > 4


@pytest.mark.filterwarnings("ignore")
def test_real_monai() -> None:
    transforms = pytest.importorskip("monai.transforms")
    compose = transforms.Compose(
        [
            transforms.RandFlipd("image", prob=0.5),
            transforms.RandGaussianNoised("image", prob=1.0),
            transforms.OneOf([transforms.RandAdjustContrastd("image", prob=1.0), transforms.Identityd("image")]),
        ]
    )

    def augment(_: Any) -> Any:
        return compose({"image": torch.arange(16.0).view(1, 4, 4)})["image"]

    with KeyedRandomness(augment) as randomness:
        first = [draw(randomness, augment, 0, use) for use in range(10)]
        assert [draw(randomness, augment, 0, use) for use in range(10)] == first
    assert len({str(values) for values in first}) == 10
