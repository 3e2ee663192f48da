"""Leaves keep their type, dtype, shape, memory format and values."""

from typing import Any

import numpy as np
import pytest
import torch

import stretto

UNITS = pytest.mark.parametrize("unit", ["example", "batch"])


class Marked(torch.Tensor):
    """A tensor subclass, such as torchvision's tv_tensors, with an attribute."""


def marked(n: int) -> torch.Tensor:
    tensor = torch.rand(n, 3).as_subclass(Marked)
    tensor.canvas = (3, 4)
    return tensor


def random_bits(dtype: torch.dtype, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 100, (n, 3), generator=generator).to(dtype)


TENSORS = [torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int16, torch.complex64, torch.float64]
ARRAYS = ["uint16", "bool", "U5", "datetime64[s]", "float16", "complex128", ">i4", "S3", "i4,f8"]
SHAPES = [(), (1,), (3,), (2, 0), (0,), (2, 3, 4)]


def echo_leaves(leaves: list[Any], unit: str) -> list[tuple[Any, torch.Tensor]]:
    """Two uses of every item of batches (leaf, ids), with the ids that say which items they are."""
    ids = torch.arange(sum(map(len, leaves))).split([len(leaf) for leaf in leaves])
    with stretto.echo([*zip(leaves, ids, strict=True)], 2, unit=unit, carry_over=False) as loader:
        return [*loader]


@UNITS
@pytest.mark.parametrize("dtype", TENSORS)
def test_tensor_dtypes_and_values_are_kept(dtype: torch.dtype, unit: str) -> None:
    leaves = [random_bits(dtype, 4), random_bits(dtype, 3)]
    for leaf, ids in echo_leaves(leaves, unit):
        assert leaf.dtype == dtype
        assert torch.equal(leaf, torch.cat(leaves)[ids])


@UNITS
@pytest.mark.parametrize("dtype", ARRAYS)
def test_array_dtypes_and_values_are_kept(dtype: str, unit: str) -> None:
    leaves = [np.arange(3 * i, 3 * i + 12).reshape(4, 3).astype("i8").astype(dtype) for i in range(2)]
    for leaf, ids in echo_leaves(leaves, unit):
        assert type(leaf) is np.ndarray
        assert leaf.dtype == np.dtype(dtype)
        assert leaf.flags.writeable
        assert np.array_equal(leaf, np.concatenate(leaves)[ids.numpy()])


@UNITS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_array", [False, True])
def test_row_shapes_are_kept(shape: tuple[int, ...], unit: str, is_array: bool) -> None:
    whole = torch.rand(8, *shape)
    leaves = [part.numpy() if is_array else part for part in whole.split(4)]
    for leaf, ids in echo_leaves(leaves, unit):
        assert leaf.shape == (len(ids), *shape)
        assert torch.equal(torch.as_tensor(leaf), whole[ids])


@UNITS
def test_channels_last_is_kept(unit: str) -> None:
    whole = torch.rand(8, 3, 4, 5)
    leaves = [part.contiguous(memory_format=torch.channels_last) for part in whole.split(4)]
    for leaf, ids in echo_leaves(leaves, unit):
        assert leaf.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(leaf, whole[ids])


def test_batches_of_other_strides_take_the_memory_format_of_the_first() -> None:
    whole = torch.rand(8, 3, 4, 5)
    leaves = [whole[:4].contiguous(memory_format=torch.channels_last), whole[4:].expand(4, 3, 4, 5)]
    for leaf, ids in echo_leaves(leaves, "example"):
        assert leaf.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(leaf, whole[ids])


@UNITS
def test_a_tensor_subclass_and_its_attributes_are_kept(unit: str) -> None:
    leaves = [marked(4), marked(4)]
    whole = torch.cat([leaf.as_subclass(torch.Tensor) for leaf in leaves])
    for leaf, ids in echo_leaves(leaves, unit):
        assert type(leaf) is Marked
        assert leaf.canvas == (3, 4)
        assert torch.equal(leaf.as_subclass(torch.Tensor), whole[ids])


def test_conjugate_views_and_read_only_arrays_are_read_right() -> None:
    numbers = random_bits(torch.complex64, 4) * 1j
    array = np.broadcast_to(np.arange(3), (4, 3))
    with stretto.echo([(numbers.conj(), array)], 1, carry_over=False) as loader:
        (leaf, rows), *_ = loader
    assert sorted(leaf.imag.sum(1).tolist()) == sorted((-numbers.imag).sum(1).tolist())
    assert np.array_equal(rows, array)


BAD_BATCHES = {
    "ragged": ([(torch.zeros(4), torch.zeros(3))], r"leaf \[1\] has 3 rows where \[0\] has 4"),
    "strings": ([{"x": torch.zeros(2), "name": ["a", "b"]}], r"leaf \['name'\]\[0\] is 'a' of type str"),
    "number": ([(torch.zeros(2), 7)], r"leaf \[1\] is 7 of type int"),
    "none": ([(torch.zeros(2), None)], r"leaf \[1\] is None of type NoneType"),
    "scalar": ([(torch.zeros(2), torch.tensor(1))], r"leaf \[1\] has no dimension"),
    "objects": ([np.array([{}, {}], dtype=object)], "leaf itself is an array of Python objects"),
    "sparse": ([torch.eye(3).to_sparse()], r"leaf itself is a tensor of layout torch.sparse_coo"),
    "nested": (
        [torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)],
        "leaf itself is a nested tensor",
    ),
    "trailing": (
        [{"x": torch.zeros(2, 5)}, {"x": torch.zeros(2, 6)}],
        r"leaf \['x'\] changes: .*\[5\], now .*\[6\]",
    ),
    "dtype": ([torch.zeros(2), torch.zeros(2).double()], "float32.*float64"),
    "type": ([torch.zeros(2), np.zeros(2, "f4")], "Tensor of float32.*ndarray of float32"),
    "no tensors": ([()], "without any tensor"),
}


@pytest.mark.parametrize(("source", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_batch_that_cannot_be_taken_apart_raises_and_suggests_whole_batches(source: Any, message: str) -> None:
    with stretto.echo(source, 2) as loader, pytest.raises(TypeError, match=message) as caught:
        list(loader)
    assert 'unit="batch"' in str(caught.value)
