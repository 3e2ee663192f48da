"""What a loader and its batches are, and whether a batch comes twice."""

from collections import UserDict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stretto
from stretto.profile.batches import Repeats, describe_loader, digest_of, look_at


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_loader_is_described_by_its_settings() -> None:
    data = TensorDataset(torch.zeros(10))
    found = describe_loader(
        DataLoader(data, batch_size=4, num_workers=2, prefetch_factor=3, persistent_workers=True)
    )
    assert found == {
        "name": "DataLoader",
        "dataset": "TensorDataset",
        "is_map_style": True,
        "num_workers": 2,
        "prefetch_factor": 3,
        "pin_memory": False,
        "persistent_workers": True,
        "length": 3,
        "num_examples": 10,
    }


def test_a_stream_and_a_list_have_no_examples_to_count() -> None:
    assert describe_loader(DataLoader(Numbers()))["is_map_style"] is False
    assert describe_loader([1, 2])["length"] == 2
    assert describe_loader([1, 2])["dataset"] == ""


def test_an_echo_loader_is_described_by_the_data_set_inside() -> None:
    data = TensorDataset(torch.zeros(10))
    assert describe_loader(stretto.EchoDataLoader(data, batch_size=2))["dataset"] == "TensorDataset"


def test_a_batch_is_counted_in_examples_and_bytes() -> None:
    found = look_at({"x": torch.zeros(4, 3), "y": np.zeros(4, np.int64)})
    assert (found["num_examples"], found["num_bytes"], found["why_not"]) == (4, 4 * 3 * 4 + 4 * 8, None)
    assert found["shapes"] == [["torch.float32", 3], ["int64"]]


def test_a_batch_that_cannot_be_taken_apart_says_why() -> None:
    found = look_at((torch.zeros(4, 3), ["a", "b", "c", "d"]))
    assert found["num_examples"] == 4
    assert "cannot be taken apart" in found["why_not"]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)),
        lambda seed: np.random.default_rng(seed).normal(size=(8, 5)),
        lambda seed: {"x": [torch.arange(10) + seed]},
        lambda seed: UserDict(x=torch.arange(10) + seed),
        lambda seed: torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).bfloat16(),
        lambda seed: torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).T,
    ],
    ids=["tensor", "array", "nested", "mapping", "bfloat16", "not contiguous"],
)
def test_equal_batches_and_no_others_have_the_same_digest(make) -> None:
    assert digest_of(make(1)) == digest_of(make(1)) is not None
    assert digest_of(make(1)) != digest_of(make(2))


@pytest.mark.parametrize("batch", [torch.zeros(8), ["a"], None, 3, torch.empty(0), np.array(["a"], dtype=object)])
def test_a_batch_that_says_nothing_has_no_digest(batch: object) -> None:
    assert digest_of(batch) is None


def test_looking_at_batches_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    Repeats().see(torch.randn(3, 3, generator=torch.Generator()), 0)
    look_at(torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_batch_again_and_again_is_found() -> None:
    repeats, batch = Repeats(), torch.arange(9.0)
    for _ in range(10):
        repeats.see(batch, 1)
    (finding,) = repeats.findings()
    assert finding.startswith("3 of 4 batches looked at had been served before in a row in the same epoch")


def test_the_same_batches_in_the_next_epoch_are_no_repeats() -> None:
    repeats = Repeats()
    for epoch in range(3):
        for at in range(10):
            repeats.see(torch.arange(9.0) + at, epoch)
    assert repeats.findings() == []
    assert repeats.num_seen == 3 * 4  # the first ones of each


def test_a_single_chance_repeat_is_no_finding() -> None:
    repeats = Repeats()
    for at in [0, 1, 2, 0]:
        repeats.see(torch.arange(9.0) + at, 1)
    assert repeats.num_repeated == 1
    assert repeats.findings() == []
