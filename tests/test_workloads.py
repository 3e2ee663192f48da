"""The study's workloads train on made-up data; their data, boxes and augmentations are as they say."""

import importlib
import io
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stretto.study import Condition, Settings, load_study, make_loader

WORKLOADS = Path(__file__).parents[1] / "benchmarks/workloads"
NAMES = ["resnet_fashion", "photographs", "text_wordnet", "text_linux", "detector"]
BATCH_SIZE = 8


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A workload trains on one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/workloads by its name."""
    monkeypatch.syspath_prepend(WORKLOADS.parent)
    return lambda name: importlib.import_module(f"workloads.{name}")


def jpegs(count: int, side: int = 72) -> list[bytes]:
    rng = np.random.default_rng(0)
    files = []
    for _ in range(count):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "JPEG")
        files.append(file.getvalue())
    return files


def made_up(module: ModuleType, workloads: Any) -> Any:
    """What `load_data` of a workload returns, tiny."""
    name = module.__name__.rpartition(".")[2]
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (24,), generator=generator)
    if name == "resnet_fashion":
        images = torch.randint(0, 256, (24, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return module.Data(images, labels, images[:10], labels[:10])
    if name == "photographs":
        files = jpegs(24)
        return module.Data(files, labels, files[:10], labels[:10])
    if name == "detector":
        items = torch.randint(60, 256, (24, 28, 28), dtype=torch.uint8, generator=generator).numpy()
        scenes = workloads("scenes").compose(items, np.arange(24) % 10, jpegs(4), 24, seed=0)
        return scenes, scenes
    rows = torch.randint(32, 127, (24, module.LENGTH + 1), dtype=torch.uint8, generator=generator)
    return workloads("corpora").Text(rows, rows[:10])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["none", "before"])
def test_a_workload_trains_and_evaluates(
    name: str, variant: str, workloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = workloads(name)
    data = made_up(module, workloads)
    monkeypatch.setattr(module, "load_data", lambda: data)
    monkeypatch.setattr(module, "EVALUATE_EVERY", 2 * BATCH_SIZE)

    def values() -> tuple[Any, float]:
        is_echoed = variant == "before" and module.study.has_augment
        condition = (
            Condition("before", 2, 2, BATCH_SIZE) if is_echoed else Condition.baseline(batch_size=BATCH_SIZE)
        )
        loader = make_loader(condition, 0, has_augment=module.study.has_augment)
        settings = Settings(batch_size=BATCH_SIZE, lr=module.study.lr[0], decay_updates=4, max_updates=4)
        try:
            first, second = islice(module.train(settings, loader, 0), 2)
            return first, second()
        finally:
            loader.close()

    first, metric = values()
    assert first is None
    assert math.isfinite(metric)
    assert (None, metric) == values(), "a run is not reproducible"


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_a_file_that_the_study_command_reads(name: str, workloads: Any) -> None:
    study = load_study(WORKLOADS / f"{name}.py")
    assert study.train.__name__ == "train"
    assert study.fingerprint == workloads(name).study.fingerprint


def test_a_loss_that_is_not_finite_ends_the_run(workloads: Any) -> None:
    common = workloads("common")
    model = torch.nn.Linear(1, 1)
    settings = Settings(batch_size=1, lr=1.0, decay_updates=1, max_updates=1)
    updates = common.train_updates(
        settings,
        [torch.full((1, 1), math.inf)],
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        lambda batch: model(batch).square().mean(),
        lambda: 0.0,
        evaluate_every=1,
    )
    with pytest.raises(FloatingPointError, match=r"the loss of update 0 is (inf|nan)"):
        next(updates)


@pytest.mark.parametrize("name", ["resnet_fashion", "photographs"])
def test_an_augmented_image_is_a_shifted_or_mirrored_one(name: str, workloads: Any) -> None:
    """One bright pixel in the middle of each image stays one, moves, and is where the generator says."""
    module = workloads(name)
    channels, side, reach = (1, 28, module.SHIFT + 1) if name == "resnet_fashion" else (3, 72, 5)
    images = torch.zeros(64, channels, side, side, dtype=torch.uint8)
    images[:, :, side // 2, side // 2] = 255
    labels = torch.arange(64)
    moved, same_labels = module.augment((images, labels), torch.Generator().manual_seed(0))
    again, _ = module.augment((images, labels), torch.Generator().manual_seed(0))
    other, _ = module.augment((images, labels), torch.Generator().manual_seed(1))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, other)
    assert torch.equal(labels, same_labels)
    assert moved.dtype == torch.uint8
    is_bright = (moved > 0).any(1)
    assert torch.equal(is_bright.sum((1, 2)), torch.ones(64, dtype=torch.int64))
    places = is_bright.nonzero()[:, 1:] - moved.shape[-1] // 2
    assert places.unique(dim=0).shape[0] > 10
    assert int(places.abs().max()) <= reach


def test_the_detector_crops_boxes_with_what_is_in_them(workloads: Any) -> None:
    """A white rectangle on black is where its box says, before and after."""
    module = workloads("detector")
    count, side = 64, 64
    images = torch.zeros(count, 3, side, side, dtype=torch.uint8)
    images[:, :, 20:36, 24:44] = 255
    boxes = torch.zeros(count, 3, 4)
    boxes[:, 1] = torch.tensor([24.0, 20.0, 44.0, 36.0])
    labels = torch.tensor([-1, 3, -1]).expand(count, 3)
    moved, moved_boxes, moved_labels = module.augment((images, boxes, labels), torch.Generator().manual_seed(0))
    assert torch.equal(labels, moved_labels)
    for image, box in zip(moved, moved_boxes[:, 1], strict=True):
        rows, columns = (image[0] > 127).nonzero().unbind(1)
        seen = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        torch.testing.assert_close(box, seen.float(), rtol=0, atol=1.0)
    assert moved_boxes[:, 1].unique(dim=0).shape[0] == count


def test_a_box_that_is_cropped_away_is_no_item(workloads: Any) -> None:
    module = workloads("detector")
    boxes = torch.tensor([0.0, 0.0, 6.0, 6.0]).expand(200, 1, 4)
    images, labels = torch.zeros(200, 3, 64, 64, dtype=torch.uint8), torch.zeros(200, 1, dtype=torch.int64)
    _, moved, left = module.augment((images, boxes, labels), torch.Generator().manual_seed(0))
    assert set(left.unique().tolist()) == {-1, 0}
    assert torch.equal(moved[left < 0], torch.zeros_like(moved[left < 0]))
    sizes = moved[left >= 0][:, 2:] - moved[left >= 0][:, :2]
    assert float(sizes.min()) > 0
    assert float(sizes.max()) <= 8


def test_boxes_come_back_from_their_offsets(workloads: Any) -> None:
    boxes = workloads("boxes")
    anchors = boxes.make_anchors(64, strides=(8, 16), sizes=(20, 32))
    assert anchors.shape == ((8 * 8 + 4 * 4) * 3, 4)
    torch.testing.assert_close((anchors[:, :2] + anchors[:, 2:])[:3] / 2, torch.full((3, 2), 4.0))
    wanted = anchors + torch.tensor([1.0, -2.0, 5.0, 3.0])
    torch.testing.assert_close(boxes.from_offsets(anchors, boxes.offsets(anchors, wanted)), wanted)


def test_every_item_has_an_anchor_that_stands_for_it(workloads: Any) -> None:
    boxes = workloads("boxes")
    anchors = boxes.make_anchors(64, strides=(8, 16), sizes=(20, 32))
    items = torch.tensor([[[0.0, 0.0, 4.0, 4.0], [10.0, 10.0, 30.0, 30.0], [0.0, 0.0, 0.0, 0.0]]])
    matched, classes = boxes.match(anchors, items, torch.tensor([[2, 0, -1]]))
    assert set(classes.unique().tolist()) == {0, 1, 3}
    assert torch.equal(matched[classes == 3].unique(dim=0), items[0, :1])
    assert torch.equal(matched[classes == 1].unique(dim=0), items[0, 1:2])
    nothing = boxes.match(anchors, torch.zeros(1, 3, 4), torch.full((1, 3), -1))[1]
    assert int(nothing.max()) == 0


def test_a_perfect_detector_has_a_map_of_1_and_a_blind_one_of_0(workloads: Any) -> None:
    boxes = workloads("boxes")
    anchors = boxes.make_anchors(64, strides=(8, 16), sizes=(20, 32))
    items = torch.tensor([[[4.0, 6.0, 24.0, 30.0], [40.0, 40.0, 60.0, 60.0]], [[8.0, 8.0, 40.0, 40.0], [0.0] * 4]])
    labels = torch.tensor([[0, 1], [1, -1]])
    score = boxes.MeanAveragePrecision(items, labels, 2)
    matched, classes = boxes.match(anchors, items, labels)
    perfect = 20 * torch.nn.functional.one_hot(classes, 3).float()
    detections = boxes.detect(anchors, perfect, boxes.offsets(anchors, matched))
    assert len(detections) == 3, "an item was found more than once"
    assert score(detections) == pytest.approx(1)
    blind = 20 * torch.nn.functional.one_hot(torch.zeros_like(classes), 3).float()
    assert score(boxes.detect(anchors, blind, boxes.offsets(anchors, matched))) == 0


def test_scenes_have_their_items_where_their_boxes_say(workloads: Any) -> None:
    scenes = workloads("scenes")
    file = io.BytesIO()
    Image.new("RGB", (72, 72)).save(file, "JPEG")
    found = scenes.compose(np.full((10, 28, 28), 255, np.uint8), np.arange(10), [file.getvalue()], 40, seed=0)
    assert found.images.shape == (40, 3, 64, 64)
    for image, boxes, labels in zip(found.images, found.boxes, found.labels, strict=True):
        inside = torch.zeros(64, 64, dtype=torch.bool)
        for left, top, right, bottom in boxes[labels >= 0].int().tolist():
            inside[top:bottom, left:right] = True
        assert torch.equal((image > 40).all(0), inside)
    assert set(found.labels.unique().tolist()) == {-1, 0, 1, 2, 3, 4}


def test_texts_that_begin_alike_are_on_one_side(workloads: Any) -> None:
    corpora = workloads("corpora")
    kinds = [
        f"{first} {second} and so on with many more words, variant" for first in "abcdefghij" for second in "klm"
    ]
    pieces = [f"{opening} {number}" for opening in kinds for number in range(40)]
    text = corpora.split(pieces, length=20, num_test=10_000)
    sides = [bytes(side.flatten().tolist()).decode() for side in (text.train, text.test)]
    found = [{kind for kind in kinds if kind in side} for side in sides]
    assert found[0] | found[1] == set(kinds)
    assert not found[0] & found[1]
    assert all(found)


def test_pieces_with_the_same_letters_are_one(workloads: Any) -> None:
    distinct = workloads("corpora").distinct
    assert distinct(["The device, 1.", "the  Device: 2", "Another."]) == ["The device, 1.", "Another."]


def test_prose_is_told_from_lists_and_code(workloads: Any) -> None:
    sentence = "This paragraph is written in whole sentences, which go on for\nlong enough to be taken for prose."
    page = f"Title\n=====\n\n{sentence}\n\n  * one\n  * two\n\n.. code-block:: c\n\n{'  x[0x10] = {1, 2};' * 9}\n"
    assert workloads("corpora")._prose(page) == [" ".join(sentence.split())]


def test_tiles_come_back_as_they_were_packed(workloads: Any) -> None:
    tiles = workloads("tiles")
    files = jpegs(5)
    assert tiles._unpack(tiles._pack(files)) == files
    assert tiles.decode(files[0]).shape == (3, 72, 72)


def test_where_there_is_no_apt_get_the_message_says_what_to_copy(
    workloads: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles = workloads("tiles")
    with pytest.raises(RuntimeError, match=r"mate-backgrounds, but there is no apt-get here: .* or copy .*\.npz"):
        tiles.load_tiles.__wrapped__()
