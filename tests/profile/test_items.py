"""Random numbers that repeat are found, and only those; looking changes nothing."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stretto import EchoDataLoader
from stretto.profile.items import RandomWatch, find_repeated_augmentation, item_bytes, item_hash
from tests.echo.transforms import Add, AddNoise, AlbuCompose, Compose, Noise
from tests.profile.worked import Noisy, global_states, seed_all, timed_iter


class Held(Noisy):
    """Augments with a NumPy Generator of its own: every worker begins with a copy of it."""

    def __init__(self) -> None:
        super().__init__(40)
        self.rng = np.random.default_rng(0)
        self.transform = self.jitter

    def jitter(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.rng.normal()


class HeldStream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __iter__(self) -> Any:
        for _ in range(8):
            yield self.rng.random()


class CachedTooLate(Noisy):
    """Keeps examples after their augmentation."""

    def __init__(self) -> None:
        super().__init__(40)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class SeededByIndex(Noisy):
    """Draws the same numbers for an index each time."""

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        random.seed(index)
        np.random.seed(index)
        return super().__getitem__(index)


class Plain(Noisy):
    """Draws nothing."""

    def __init__(self) -> None:
        super().__init__(40)
        self.transform = Add(1)


def reseed(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(torch.initial_seed())


def seed_numpy_alike(worker_id: int) -> None:
    np.random.seed(1)


def found_in(loader: Any, directory: Path, num_epochs: int = 2) -> list[str]:
    for iteration in range(1, num_epochs + 1):
        for _ in timed_iter(loader, directory, iteration):
            pass
    return find_repeated_augmentation(directory)


def test_a_numpy_generator_copied_to_workers_is_found(tmp_path: Path) -> None:
    across, epochs = found_in(DataLoader(Held(), 4, num_workers=2), tmp_path)
    assert across.startswith(
        "Identical augmentation across workers: a numpy Generator held by the data set (Held) began in the same "
        "state in workers 0 and 1, which therefore draw the same random numbers. A worker begins with a copy"
    )
    assert epochs.startswith(
        "Identical augmentation in every epoch: a numpy Generator held by the data set (Held) was in the same "
        "state when iterations 1 and 2 began"
    )


def test_its_correct_twin_is_not(tmp_path: Path) -> None:
    assert found_in(DataLoader(Held(), 4, num_workers=2, worker_init_fn=reseed), tmp_path) == []


def test_one_epoch_and_persistent_workers_show_only_what_is_there(tmp_path: Path) -> None:
    loader = DataLoader(Held(), 4, num_workers=2, persistent_workers=True)
    (across,) = found_in(loader, tmp_path)
    assert across.startswith("Identical augmentation across workers")
    loader._iterator = None
    (other := tmp_path / "other").mkdir()
    assert found_in(DataLoader(Held(), 4, num_workers=1), other, 1) == []
    assert [*other.glob("random-*")] != []


def test_a_global_generator_seeded_alike_in_each_worker_is_found(tmp_path: Path) -> None:
    across, epochs = found_in(DataLoader(Noisy(), 4, num_workers=2, worker_init_fn=seed_numpy_alike), tmp_path)
    assert across.startswith("Identical augmentation across workers: numpy.random (Noisy)")
    assert epochs.startswith("Identical augmentation in every epoch: numpy.random (Noisy)")
    assert "Do not seed it with the same number" in across


def test_an_iterable_data_set_is_told_with_a_doubt(tmp_path: Path) -> None:
    across, _ = found_in(DataLoader(HeldStream(), 4, num_workers=2), tmp_path)
    assert "a Python Random held by the data set (HeldStream)" in across
    assert "(a bug if they are drawn for augmentation)" in across


def test_seeding_before_each_epoch_is_found_without_workers(tmp_path: Path) -> None:
    loader = DataLoader(Noisy(), 4)
    for iteration in (1, 2):
        seed_all()
        for _ in timed_iter(loader, tmp_path, iteration):
            pass
    names = ["torch", "numpy.random", "random"]
    found = find_repeated_augmentation(tmp_path)
    assert [sentence.partition(":")[2].split()[0] for sentence in found] == names


@pytest.mark.parametrize("make", [CachedTooLate, lambda: SeededByIndex(40)], ids=["cached", "seeded"])
def test_an_augmentation_that_never_changes_is_found(make: Callable[[], Any], tmp_path: Path) -> None:
    dataset = make()
    (sentence,) = found_in(DataLoader(dataset, 4, shuffle=True), tmp_path)
    assert sentence.startswith(
        "The augmentation of an example never changes: random numbers are drawn, but all 40 examples of "
        f"{type(dataset).__name__} that were looked at are the same in iterations 1 and 2"
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Plain(), Noisy(40)], ids=["nothing drawn", "drawn anew"])
def test_nothing_is_found_in_a_correct_loader(dataset: Dataset[Any], num_workers: int, tmp_path: Path) -> None:
    assert found_in(DataLoader(dataset, 4, shuffle=True, num_workers=num_workers), tmp_path) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_is_found_in_an_echo_whose_randomness_is_keyed(num_workers: int, tmp_path: Path) -> None:
    loader = EchoDataLoader(Held(), 4, buffer=16, echo_after="read", num_workers=num_workers)
    assert found_in(loader, tmp_path) == []


def test_too_few_examples_prove_nothing(tmp_path: Path) -> None:
    assert found_in(DataLoader(SeededByIndex(31), 4, shuffle=True), tmp_path) == []
    assert find_repeated_augmentation(tmp_path / "missing") == []


def test_a_file_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "random-7-1-0-1.json").write_text('{"loader": 7, "iter')
    (tmp_path / "items-7-1-0-1-0.rows").write_bytes(b"{")
    assert len(found_in(DataLoader(Held(), 4, num_workers=2), tmp_path)) == 2


def test_watching_changes_no_state_and_gives_no_transform_another_generator() -> None:
    noise = Noise(1)
    dataset = Noisy()
    dataset.transform = AlbuCompose([noise])
    generator, states = noise.random_generator, global_states()
    state = copy.deepcopy(generator.bit_generator.state)
    watch = RandomWatch(dataset)
    watch.begin()
    noise.random_generator.normal()
    torch.rand(1)
    watch.end()
    assert noise.random_generator is generator
    moved = [name for name, was_moved in zip(watch.names, watch.moved, strict=True) if was_moved]
    assert moved == ["torch", "a numpy Generator held by the data set"]
    generator.bit_generator.state = state
    assert global_states()[1:] == states[1:]


def test_generators_of_all_kinds_are_watched() -> None:
    held = [
        torch.Generator(),
        np.random.RandomState(1),
        random.Random(1),
        np.random.PCG64(1),
        random.SystemRandom(),
    ]
    dataset: Any = Noisy()
    dataset.transform = Compose([AddNoise(), held])  # never called
    watch = RandomWatch(dataset)
    assert watch.names == [
        "torch",
        "numpy.random",
        "random",
        "a torch Generator held by the data set",
        "a numpy RandomState held by the data set",
        "a Python Random held by the data set",
        "a numpy PCG64 held by the data set",
        "a Python SystemRandom held by the data set",
    ]
    assert [bool(digest) for digest in watch.start] == [True] * 7 + [False]


def test_equal_items_have_equal_hashes_and_others_do_not() -> None:
    image = torch.rand(3, 64, 64)
    item = {"image": image, "name": "a", "target": np.int64(3)}
    assert item_hash(item) == item_hash({"image": image.clone(), "name": "a", "target": np.int64(3)})
    others = [{**item, "image": image.flip(2)}, {**item, "name": "b"}, {**item, "target": np.int64(4)}]
    assert len({item_hash(item), *map(item_hash, others)}) == 4
    assert item_hash(image[:, ::2].numpy()) == item_hash(image[:, ::2].numpy().copy())
    assert item_hash([object()]) is None
    assert item_hash(np.array([object()])) is None
    assert 0 <= (item_hash([image, image]) or 0) < 1 << 48


def test_the_bytes_of_an_item_are_those_of_a_copy() -> None:
    rows = torch.zeros(100, 5)
    assert item_bytes(rows[3]) == 20
    assert item_bytes({"a": (rows[:2], np.zeros(3)), "b": b"1234"}) == 40 + 24 + 4
