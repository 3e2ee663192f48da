"""Batches of any nesting come out in the types they went in with."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import stretto
from stretto.tree import flatten


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


pytree.register_dataclass(Sample)


class Named(dict[str, Any]):
    name = "unnamed"


class Encoding(UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding: a UserDict with attributes of its own."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


def image_of(ids: torch.Tensor) -> torch.Tensor:
    return ids.float().view(-1, 1, 1) + torch.arange(6.0).view(2, 3) / 10


def named(ids: torch.Tensor) -> Named:
    batch = Named(label=ids, image=image_of(ids))
    batch.name = "train"
    return batch


MAKERS = {
    "tensor": lambda ids: ids,
    "dict": lambda ids: {"image": image_of(ids), "label": ids},
    "tuple": lambda ids: (image_of(ids), ids),
    "list": lambda ids: [image_of(ids), ids],
    "NamedTuple": lambda ids: Pair(image_of(ids), ids),
    "dataclass": lambda ids: Sample(image_of(ids), ids),
    "OrderedDict": lambda ids: OrderedDict(label=ids, image=image_of(ids)),
    "UserDict": lambda ids: Encoding({"image": image_of(ids), "label": ids}, "tokens"),
    "dict subclass": named,
    "read-only mapping": lambda ids: MappingProxyType({"image": image_of(ids), "label": ids}),
    "nested": lambda ids: {
        "views": [Pair(image_of(ids), ids), (ids,)],
        "text": Encoding({"deep": {"tokens": [ids, named(ids)]}}, "x"),
        "empty": [],
    },
}


def parts(batch: Any) -> tuple[str, list[torch.Tensor], list[str]]:
    """What must come back: containers and types, leaves, attributes."""
    leaves, structure = flatten(batch)
    kinds = [type(batch).__name__, *structure.paths]
    return ", ".join(kinds), leaves, [getattr(batch, "encodings", ""), getattr(batch, "name", "")]


@pytest.mark.parametrize("unit", ["example", "batch"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_batches_come_out_in_the_types_they_went_in_with(make: Any, unit: str) -> None:
    source = [make(ids) for ids in torch.arange(12).split(4)]
    with stretto.echo(source, 2, unit=unit, carry_over=False) as loader:
        batches = [*loader]
    assert len(batches) == 6
    for batch in batches:
        kinds, leaves, attributes = parts(batch)
        ids = next(leaf for leaf in leaves if leaf.dtype == torch.int64)
        expected_kinds, expected_leaves, expected_attributes = parts(make(ids))
        assert type(batch) is type(source[0])
        assert kinds == expected_kinds
        assert attributes == expected_attributes
        assert flatten(batch)[1].is_like(flatten(source[0])[1])
        for leaf, expected in zip(leaves, expected_leaves, strict=True):
            torch.testing.assert_close(leaf, expected, rtol=0, atol=0)


@pytest.mark.parametrize("unit", ["example", "batch"])
@pytest.mark.parametrize(
    "other",
    [
        {"image": torch.zeros(4), "extra": torch.zeros(4)},
        {"image": torch.zeros(4)},
        (torch.zeros(4), torch.zeros(4)),
        Named(image=torch.zeros(4), label=torch.zeros(4)),
        OrderedDict(image=torch.zeros(4), label=torch.zeros(4)),
    ],
    ids=["another key", "a key less", "a tuple", "a subclass", "an OrderedDict"],
)
def test_different_structures_raise(other: Any, unit: str) -> None:
    source = [{"image": torch.zeros(4), "label": torch.zeros(4)}, other]
    with stretto.echo(source, 1, unit=unit) as loader, pytest.raises(TypeError, match="different structures"):
        list(loader)


@pytest.mark.parametrize("unit", ["example", "batch"])
def test_structures_that_differ_deep_inside_raise(unit: str) -> None:
    source = [(Encoding({"a": {key: torch.zeros(2)}}, ""), torch.zeros(2)) for key in "xy"]
    with stretto.echo(source, 1, unit=unit) as loader, pytest.raises(TypeError, match="different structures"):
        list(loader)


class Graph:
    """A custom batch: nothing that pytree knows."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def clone(self) -> "Graph":
        return Graph(self.nodes.clone())


class Plain:
    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes


@pytest.mark.parametrize("make", [Graph, Plain])
def test_a_custom_batch_class_is_echoed_whole_and_copied(make: type[Graph] | type[Plain]) -> None:
    source = [make(torch.full((size,), 1.0)) for size in (2, 3, 5)]
    with stretto.echo(source, 3, unit="batch", carry_over=False) as loader:
        for batch in loader:
            assert type(batch) is make
            assert batch.nodes.unique().tolist() == [1]
            batch.nodes.mul_(7)
        assert loader.stats().updates == 9


def test_ragged_lists_are_echoed_whole() -> None:
    """Detection targets: a list with one entry for each image, of varying length."""
    source = [(torch.zeros(n, 3), [{"boxes": torch.zeros(i, 4)} for i in range(n)]) for n in (2, 4)]
    with stretto.echo(source, 2, unit="batch", carry_over=False) as loader:
        assert sorted(len(targets) for _, targets in loader) == [2, 2, 4, 4]
