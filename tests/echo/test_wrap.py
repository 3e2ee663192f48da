"""StagedDataset.wrap: data sets with a transform, taken apart."""

import copy
import pickle
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from stretto import StagedDataset
from stretto.tree import clone, count_bytes
from tests.echo.transforms import (
    Add,
    AlbuCompose,
    Both,
    Compose,
    Crops,
    HorizontalFlip,
    ModuleCompose,
    MonaiCompose,
    Noise,
    Pipeline,
    RandShift,
    Sometimes,
    Standard,
    Times,
    VerticalFlip,
)

Use = Callable[[Any, torch.Tensor], Any]


class Images(Dataset[Any]):
    """A data set whose `__getitem__` does what the test says."""

    def __init__(self, use: Use, **attributes: Any) -> None:
        self.use = use
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.use(self, torch.arange(3.0) + index)


def image_and_target(self: Any, image: torch.Tensor) -> Any:
    return self.transform(image), 7


def names(dataset: Any) -> list[str]:
    return list(StagedDataset.wrap(dataset).stages)


def check(dataset: Any, *stages: str) -> None:
    """Wrapped, the data set has these stages and the same examples, also when cut anywhere."""
    wrapped = StagedDataset.wrap(dataset)
    assert list(wrapped.stages) == ["read", *stages]
    assert len(wrapped) == len(dataset)
    for after in wrapped.stages:
        before, rest = wrapped.split(after)
        torch.manual_seed(0)
        expected = dataset[5]
        torch.manual_seed(0)
        torch.testing.assert_close(rest(before[5]), expected, rtol=0, atol=0)


def test_members_of_a_compose_are_stages() -> None:
    members = [Add(1), Compose([Times(2), nn.Sequential(nn.Identity(), nn.Dropout())]), Add(3), lambda x: -x]
    stages = ("Add", "Times", "Identity", "Dropout", "Add_2", "function")
    check(Images(image_and_target, transform=Compose(members)), *stages)
    check(Images(image_and_target, transform=ModuleCompose(members)), *stages)
    check(Images(image_and_target, transform=Pipeline(2)), "Add", "Times")


def test_a_transform_without_members_is_one_stage() -> None:
    check(Images(image_and_target, transform=Add(1)), "Add")
    check(Images(image_and_target, transform=Compose([])), "Compose")
    assert names(Images(image_and_target, transform=Sometimes([Add(1), Add(2)]))) == ["read", "Sometimes"]


def test_a_module_with_hooks_stays_whole() -> None:
    hooked = nn.Sequential(nn.Identity(), nn.Identity())
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    check(Images(image_and_target, transform=hooked), "Sequential")


def test_a_data_set_without_a_transform_has_the_stage_read() -> None:
    check(Images(lambda self, image: image))
    check(Images(lambda self, image: image, transform=None, target_transform=None))
    wrapped = StagedDataset.wrap(Images(lambda self, image: image))
    assert StagedDataset.wrap(wrapped) is wrapped


def test_the_result_goes_where_the_data_set_put_it() -> None:
    t = Compose([Add(1), Times(2)])
    shapes: list[Use] = [
        lambda self, image: self.transform(image),
        lambda self, image: [{"a": (self.transform(image), 1)}, image],
        lambda self, image: UserDict(image=self.transform(image)),
        lambda self, image: (self.transform(image), self.transform(image * 10)),
        lambda self, image: self.transform(image)[1:],
        lambda self, image: image if image[0] > 2 else self.transform(image),
    ]
    for use in shapes:
        dataset = Images(use, transform=t)
        wrapped = StagedDataset.wrap(dataset)
        for index in (0, 5):
            expected = dataset[index]
            assert str(wrapped[index]) == str(expected)
            assert type(wrapped[index]) is type(expected)


def test_a_target_transform_is_a_stage_of_its_own() -> None:
    def use(self: Any, image: torch.Tensor) -> Any:
        return self.transform(image), self.target_transform(7)

    check(
        Images(use, transform=Compose([Add(1), Times(2)]), target_transform=Add(100)),
        *["Add", "Times", "target_transform"],
    )
    check(Images(lambda s, image: (image, s.target_transform(7)), target_transform=Add(1)), "target_transform")


def test_joint_transforms_are_split_too() -> None:
    def use(self: Any, image: torch.Tensor) -> Any:
        image, target = self.transforms(image, 7)
        return image, target

    check(Images(use, transform=None, transforms=ModuleCompose([Both(), Both()])), "Both", "Both_2")
    check(Images(use, transforms=Both()), "Both")
    t, u = Compose([Add(1), Times(2)]), Add(5)
    check(
        Images(use, transform=t, target_transform=u, transforms=Standard(t, u)), "Add", "Times", "target_transform"
    )
    check(Images(use, transform=t, target_transform=None, transforms=Standard(t, None)), "Add", "Times")


def test_subsets_are_taken_apart_like_their_data_set() -> None:
    dataset = Images(image_and_target, transform=Compose([Add(1), Times(2)]))
    check(Subset(Subset(dataset, range(1, 8)), range(6)), "Add", "Times")


def test_wrapping_leaves_the_data_set_as_it_is() -> None:
    transform = Compose([Add(1)])
    dataset = Images(image_and_target, transform=transform)
    StagedDataset.wrap(dataset)[0]
    assert dataset.transform is transform  # type: ignore[attr-defined]
    assert isinstance(dataset[0][0], torch.Tensor)


def test_monais_compose_runs_its_members_itself() -> None:
    shift, crops = RandShift(), Crops()
    shift.set_random_state(seed=1)
    crops.set_random_state(seed=2)
    use: Use = lambda self, image: self.transform({"image": image, "label": 3})  # noqa: E731
    dataset = Images(use, transform=MonaiCompose([crops, shift]))
    wrapped = StagedDataset.wrap(copy.deepcopy(dataset))
    assert list(wrapped.stages) == ["read", "Crops", "RandShift"]
    torch.testing.assert_close(wrapped[5], dataset[5], rtol=0, atol=0)
    assert names(Images(use, transform=MonaiCompose([crops], lazy=True))) == ["read", "Compose"]
    assert names(Images(use, transform=MonaiCompose([crops, MonaiCompose([shift])]))) == [
        "read",
        "Crops",
        "Compose",
    ]


def albumentations_images(transform: Any) -> Images:
    def use(self: Any, image: torch.Tensor) -> Any:
        array = image.numpy().reshape(1, 3)
        out = self.transform(image=array, masks=[array, array], force_apply=True)
        return out["image"], out["masks"], 7

    return Images(use, transform=transform)


def test_albumentations_compose_is_split_with_its_checks_and_lists() -> None:
    transform = AlbuCompose([HorizontalFlip(), AlbuCompose([Noise(1), VerticalFlip()]), Noise()])
    dataset = albumentations_images(transform)
    wrapped = StagedDataset.wrap(dataset)
    assert list(wrapped.stages) == ["read", "HorizontalFlip", "Noise", "VerticalFlip", "Noise_2"]
    for index in range(8):
        transform.set_random_seed(index)
        expected = dataset[index]
        transform.set_random_seed(index)
        image, masks, target = wrapped[index]
        np.testing.assert_array_equal(image, expected[0])
        assert isinstance(masks, list)
        np.testing.assert_array_equal(masks, expected[1])
        assert target == 7
    wrong = StagedDataset.wrap(Images(lambda self, image: self.transform(image=3), transform=transform))
    with pytest.raises(TypeError, match="image must be numpy array type"):
        wrong[0]


@pytest.mark.parametrize(
    "compose",
    [
        AlbuCompose([Noise()], p=0.5),
        AlbuCompose([Noise()], processors=("bboxes",)),
        AlbuCompose([AlbuCompose([Noise()], p=0.5)]),
    ],
)
def test_albumentations_compose_that_does_more_stays_whole(compose: Any) -> None:
    assert names(albumentations_images(compose)) == ["read", "Compose"]


def in_a_thread(self: Any, image: torch.Tensor) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(self.transform, image).result()


@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("calculates with the result of self.transform", lambda self, image: self.transform(image) * 2),
        ("calculates with", lambda self, image: 1 - self.transform(image)),
        ("uses .shape of", lambda self, image: self.transform(image).shape),
        ("takes the items of", lambda self, image: list(self.transform(image))),
        ("takes the items of", lambda self, image: [*self.transform(image, image)[0]]),
        ("asks for the length", lambda self, image: len(self.transform(image))),
        ("compares or tests", lambda self, image: self.transform(image) or image),
        ("asks for the type", lambda self, image: isinstance(self.transform(image), torch.Tensor)),
        (
            "passes the result of self.transform to torch's stack",
            lambda s, image: torch.stack([s.transform(image)]),
        ),
        ("converts", lambda self, image: np.asarray(self.transform(image))),
        ("converts", lambda self, image: (value := self.transform(image), f"{value}")),
        ("converts", lambda self, image: (value := self.transform(image), str(value))),
        ("asks for the type", lambda self, image: torch.as_tensor(self.transform(image))),
        ("sets an item of", lambda self, image: self.transform(image).__setitem__(0, 1)),
        ("sets an attribute of", lambda self, image: setattr(self.transform(image), "y", 1)),
        ("copies or pickles", lambda self, image: copy.copy(self.transform(image))),
        (
            "passes the result of self.transform to self.transform",
            lambda s, image: s.transform([s.transform(image)]),
        ),
        ("drops", lambda self, image: (self.transform(image), image)[1]),
        ("in an object that is no list", lambda self, image: SimpleNamespace(image=self.transform(image))),
        ("uses self.transform.transforms", lambda self, image: self.transform.transforms[0](image)),
        ("is not what calls self.transform", in_a_thread),
        ("passes img= to a Compose", lambda self, image: self.transform(img=image)),
    ],
)
def test_a_data_set_that_needs_the_result_is_refused(what: str, use: Use) -> None:
    wrapped = StagedDataset.wrap(Images(use, transform=Compose([Add(1), Add(2)])))
    with pytest.raises(TypeError) as failed:
        wrapped[0]
    message = str(failed.value)
    assert message.startswith("StagedDataset.wrap cannot take Images apart: its __getitem__ ")
    assert what in message
    assert message.endswith("Name the stages yourself: StagedDataset(source, name=function, ...)")


def test_a_result_kept_for_a_later_example_is_refused() -> None:
    def use(self: Any, image: torch.Tensor) -> Any:
        self.kept.append(self.transform(image))
        return self.kept[0]

    wrapped = StagedDataset.wrap(Images(use, transform=Add(1), kept=[]))
    wrapped[0]
    with pytest.raises(TypeError, match=r"returns the result of self\.transform from an earlier call"):
        wrapped[0]


def test_a_transform_that_cannot_be_replaced_is_refused() -> None:
    class Fixed(Images):
        @property
        def transform(self) -> Any:
            return Add(1)

    with pytest.raises(TypeError, match=r"cannot take Fixed apart: its \.transform cannot be replaced"):
        StagedDataset.wrap(Fixed(image_and_target))


def test_an_error_after_the_transform_says_that_it_was_put_off() -> None:
    def use(self: Any, image: torch.Tensor) -> Any:
        return {}[str(type(self.transform(image)))]

    with pytest.raises(KeyError) as failed:
        StagedDataset.wrap(Images(use, transform=Add(1)))[2]
    assert failed.value.__notes__[0].startswith("StagedDataset.wrap had put off self.transform")
    assert failed.value.__notes__[1] == 'In stage "read", index 2'


def test_isinstance_sees_the_compose() -> None:
    def use(self: Any, image: torch.Tensor) -> Any:
        assert isinstance(self.transform, Compose)
        return self.transform(image)

    check(Images(use, transform=Compose([Add(1)])), "Add")


def test_an_example_between_stages_can_be_kept_copied_counted_and_sent() -> None:
    wrapped = StagedDataset.wrap(Images(image_and_target, transform=Compose([Add(1), Times(2)])))
    before, rest = wrapped.split("Add")
    kept = before[5]
    assert count_bytes(kept) == 12 + len("Images") + len("transform")
    for other in (clone(kept), pickle.loads(pickle.dumps(kept))):
        kept.calls[0].args[0].add_(1)
        torch.testing.assert_close(rest(other), wrapped[5])
        kept.calls[0].args[0].sub_(1)
    torch.testing.assert_close(rest(kept), rest(kept))


def test_real_albumentations() -> None:
    albumentations = pytest.importorskip("albumentations")
    a = albumentations
    inner = a.Compose([a.HorizontalFlip(), a.RandomBrightnessContrast()])
    transform = a.Compose([a.RandomCrop(8, 8), inner, a.OneOf([a.Blur(), a.NoOp()]), a.Normalize()])

    def use(self: Any, image: torch.Tensor) -> Any:
        array = (np.arange(3 * 32 * 32) % 251 + int(image[0])).astype(np.uint8).reshape(32, 32, 3)
        out = self.transform(image=array, masks=[array[..., 0]])
        return out["image"], out["masks"]

    dataset = Images(use, transform=transform)
    wrapped = StagedDataset.wrap(dataset)
    assert list(wrapped.stages) == [
        *("read", "RandomCrop", "HorizontalFlip", "RandomBrightnessContrast", "OneOf", "Normalize")
    ]
    for index in range(8):
        transform.set_random_seed(index)
        expected = dataset[index]
        transform.set_random_seed(index)
        torch.testing.assert_close(wrapped[index], expected, rtol=0, atol=0)
    for whole in (
        a.Compose([a.NoOp()], p=0.5),
        a.Compose([a.HorizontalFlip()], bbox_params=a.BboxParams("coco", label_fields=[])),
        a.Compose([a.NoOp()], save_applied_params=True),
    ):
        assert names(Images(use, transform=whole)) == ["read", "Compose"]


@pytest.mark.filterwarnings("ignore")
def test_real_monai() -> None:
    transforms = pytest.importorskip("monai.transforms")
    data = pytest.importorskip("monai.data")
    members = [
        transforms.RandFlipd("image", prob=0.5),
        transforms.RandCropByPosNegLabeld("image", "label", [4, 4], num_samples=2),
        transforms.RandGaussianNoised("image", prob=0.5),
    ]
    compose = transforms.Compose(members)
    items = [{"image": torch.rand(1, 8, 8), "label": torch.eye(8)[None]} for _ in range(4)]
    dataset = data.Dataset(items, compose)
    wrapped = StagedDataset.wrap(dataset)
    assert list(wrapped.stages) == ["read", *(type(member).__name__ for member in members)]
    for index in range(4):
        compose.set_random_state(seed=index)
        expected = dataset[index]
        compose.set_random_state(seed=index)
        for mine, theirs in zip(wrapped[index], expected, strict=True):
            assert torch.equal(mine["image"], theirs["image"])
    with pytest.raises(TypeError, match=r"cannot take CacheDataset apart: .* self\.transform\.get_index_of_first"):
        StagedDataset.wrap(data.CacheDataset(items, compose, num_workers=None, progress=False))[0]
