"""What cannot be saved, and what cannot be loaded, says why."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

import stretto
from tests.echo.sources import Counting, Numbers, epoch, id_batches, rest_of_epoch, state_after

UNITS = pytest.mark.parametrize("unit", ["example", "batch"])


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({"seed": 1}, {"seed": 2}, "seed=1.*seed=2"),
    "factor": ({"factor": 2}, {"factor": 3}, r"factor=2\.0.*factor=3\.0"),
    "auto": ({"factor": 2}, {"factor": "auto"}, r"factor=2\.0.*factor='auto'"),
    "unit": ({"unit": "example"}, {"unit": "batch"}, "unit='example'.*unit='batch'"),
    "buffer": ({"buffer": 8}, {"buffer": "1KB"}, "buffer=8.*buffer='1KB'"),
    "carry_over": ({"carry_over": True}, {"carry_over": False}, "carry_over=True.*carry_over=False"),
    "updates_per_epoch": ({"updates_per_epoch": 3}, {}, "updates_per_epoch=3.*updates_per_epoch=None"),
    "max_factor": (
        {"factor": "auto", "max_factor": 4},
        {"factor": "auto", "max_factor": 5},
        "max_factor=4.*max_factor=5",
    ),
}


@pytest.mark.parametrize(("saved", "current", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_state_from_other_settings_raises_with_both_values(
    saved: dict[str, Any], current: dict[str, Any], message: str
) -> None:
    def make(**settings: Any) -> stretto.EchoLoader:
        return stretto.echo(DataLoader(Numbers(12), 3), **settings)

    state = state_after(make(**saved), 2)
    with make(**current) as loader, pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        (DataLoader(Numbers(12), 3), DataLoader(Numbers(12), 4), "batch_size=3.*batch_size=4"),
        (DataLoader(Numbers(12), 3), DataLoader(Numbers(15), 3), r"len\(loader\)=4.*len\(loader\)=5"),
        (id_batches(4, 3), id_batches(4, 2), "batch_size=3.*batch_size=2"),
    ],
    ids=["batch size", "length", "rows of a list"],
)
def test_a_state_of_another_loader_raises_with_both_values(saved: Any, current: Any, message: str) -> None:
    state = state_after(stretto.echo(saved), 2)
    with stretto.echo(current) as loader, pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)


@pytest.mark.parametrize("name", ["rank", "world_size"])
def test_a_state_of_another_rank_raises_with_both_values(name: str) -> None:
    loader = stretto.echo(id_batches(4, 3))
    state = state_after(loader, 1)
    now = state["settings"][name]
    state["settings"][name] = 7
    with stretto.echo(id_batches(4, 3)) as current, pytest.raises(ValueError, match=f"{name}=7.*{name}={now}"):
        current.load_state_dict(state)


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_a_state_of_another_version_raises(version: Any) -> None:
    with (
        stretto.echo(id_batches(4, 3)) as loader,
        pytest.raises(ValueError, match=f"version {version!r}, expected 1"),
    ):
        loader.load_state_dict({"version": version})


@UNITS
def test_a_state_whose_batches_look_different_raises(unit: str) -> None:
    def make(dtype: torch.dtype) -> stretto.EchoLoader:
        return stretto.echo([{"x": torch.zeros(3, 2, dtype=dtype)}] * 4, 3, unit=unit)

    state = state_after(make(torch.float32), 2)
    with pytest.raises(ValueError, match=r"leaf \['x'\] was saved with .*float32.*float64"):
        rest_of_epoch(make(torch.float64), state)


@UNITS
def test_a_state_whose_leaves_have_other_names_raises(unit: str) -> None:
    state = state_after(stretto.echo([{"x": torch.zeros(3)}] * 4, 3, unit=unit), 2)
    with pytest.raises(ValueError, match=r"saved with leaves \[.*'x'.*\], .* have \[.*'y'.*\]"):
        rest_of_epoch(stretto.echo([{"y": torch.zeros(3)}] * 4, 3, unit=unit), state)


class Dice(Sampler[int]):
    """An order that nothing can make again."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=torch.Generator()).tolist())


class Buckets(BatchSampler):
    """A batch sampler with an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield [2, 0]
        yield [1, 3]


DATA = Numbers(4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Dice", {"sampler": Dice(4), "batch_size": 2}),
        ("Dice", {"batch_sampler": BatchSampler(Dice(4), 2, False)}),
        ("Buckets", {"batch_sampler": Buckets(SequentialSampler(DATA), 2, False)}),
    ],
)
def test_an_order_that_cannot_be_made_again_raises_on_load(name: str, settings: dict[str, Any]) -> None:
    def make() -> stretto.EchoLoader:
        return stretto.echo(DataLoader(DATA, **settings))

    state = state_after(make(), 1)
    with make() as loader, pytest.raises(ValueError, match=f"the order of {name} cannot be made again"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "sampler", [None, RandomSampler(DATA), DistributedSampler(DATA, 1, 0), SequentialSampler(DATA)]
)
def test_orders_that_can_be_made_again_load(sampler: Any) -> None:
    def make() -> stretto.EchoLoader:
        return stretto.echo(DataLoader(DATA, 2, sampler=sampler))

    with make() as loader:
        whole = epoch(loader)
    rest = rest_of_epoch(make(), state_after(make(), 1))
    assert [batch.tolist() for batch in rest] == whole[1:]


class Odd:
    pass


@pytest.mark.parametrize(
    ("leaf", "unit"), [(np.array(["a", "b"]), "example"), (np.array(["a", "b"]), "batch"), (Odd(), "batch")]
)
def test_a_leaf_that_a_file_would_refuse_raises_with_its_path(leaf: Any, unit: str) -> None:
    with stretto.echo([{"x": torch.zeros(2), "name": leaf}] * 3, 2, unit=unit) as loader:
        next(iter(loader))
        with pytest.raises(TypeError, match=r"the buffer's leaf \['name'\] is .*Use checkpoint_buffer=False"):
            loader.state_dict()


def test_whole_batches_of_differing_leaves_cannot_be_saved() -> None:
    """Such as detection targets, a list with an entry for each image; the contents can be left out."""
    source = [[torch.zeros(2)] * size for size in (1, 3)]
    with pytest.raises(TypeError, match=r"\['\[0\]', '\[1\]', '\[2\]'\].*Use checkpoint_buffer=False"):
        state_after(stretto.echo(source, 4, unit="batch"), 4)
    state_after(stretto.echo(source, 4, unit="batch", checkpoint_buffer=False), 4)


class OddState(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"cursor": [1, Odd()]}


def test_a_loader_state_that_a_file_would_refuse_raises_with_its_path() -> None:
    with stretto.echo(OddState(), 1) as loader:
        next(iter(loader))
        with pytest.raises(TypeError, match=r"\['loader_state'\]\['cursor'\]\[1\] is .*Odd"):
            loader.state_dict()


def test_a_data_set_that_has_shrunk_raises() -> None:
    class Shrinking(list[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(self[:1])

    state = state_after(stretto.echo(id_batches(4, 2), 1, buffer=2), 3)
    with pytest.raises(
        ValueError, match="pass 0 of the loader ended after 1 batches, but the state was saved after"
    ):
        rest_of_epoch(stretto.echo(Shrinking(id_batches(4, 2)), 1, buffer=2), state)


def test_another_sampler_is_refused_by_name() -> None:
    state = state_after(stretto.echo(DataLoader(Numbers(12), 3, shuffle=True), 2), 3)
    message = r"samplers=.*RandomSampler.*samplers=.*SequentialSampler"
    with stretto.echo(DataLoader(Numbers(12), 3), 2) as loader, pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], {}, {"version": 1}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with (
        stretto.echo(id_batches(3, 2), 2) as loader,
        pytest.raises(ValueError, match="not saved by Echo"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_echo_loader_cannot_be_copied(copy_of: Any) -> None:
    with stretto.echo(id_batches(3, 2), 2) as loader, pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy_of(loader)
