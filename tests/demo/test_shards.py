import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto.demo.shards import Index, ShardEntry, decode, encode

SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4))
IMAGES = SHAPES.flatmap(lambda shape: hnp.arrays(np.uint8, shape))
SHARD = encode(np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([3, 9]))


@settings(max_examples=100)
@given(IMAGES, st.data())
def test_decode_returns_what_was_encoded(images: np.ndarray, data: st.DataObject) -> None:
    labels = data.draw(hnp.arrays(np.int64, len(images), elements=st.integers(0, 255)))
    found_images, found_labels = decode(encode(images, labels), "a")
    np.testing.assert_array_equal(found_images, images)
    np.testing.assert_array_equal(found_labels, labels)


@settings(max_examples=100)
@given(st.integers(0, len(SHARD) - 1))
def test_every_truncation_is_an_error_with_name_and_bytes(size: int) -> None:
    with pytest.raises(ValueError, match=rf"Shard s3://b/7\.shard is truncated: {size} bytes, expected \d+"):
        decode(SHARD[:size], "s3://b/7.shard")


@settings(max_examples=100)
@given(st.integers(0, len(SHARD) - 1), st.integers(1, 255))
def test_every_changed_byte_is_an_error_with_the_name(position: int, change: int) -> None:
    damaged = bytearray(SHARD)
    damaged[position] ^= change
    with pytest.raises(ValueError, match=r"s3://b/7\.shard"):
        decode(bytes(damaged), "s3://b/7.shard")


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error_with_the_name(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"s3://b/7\.shard"):
        decode(data, "s3://b/7.shard")


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_no_index(data: bytes) -> None:
    with pytest.raises(ValueError, match=rf"x/index\.json \({len(data)} bytes\) is no index"):
        Index.from_json(data, "x/index.json")


def test_index_survives_json() -> None:
    index = Index(2, (ShardEntry("shards/00000.shard", 90, 2), ShardEntry("shards/00001.shard", 60, 1)))
    assert Index.from_json(index.to_json()) == index
    assert index.num_examples == 3
    assert index.num_bytes == 150


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 3, 4), np.float32), np.zeros(2, int), r"found float32 \[2, 3, 4\]"),
        (np.zeros((2, 3, 4), np.uint8), np.zeros(3, int), r"int64 \[3\]"),
        (np.zeros((2, 3, 4), np.uint8), np.array([0, 256]), "found 0 to 256"),
    ],
)
def test_examples_that_do_not_fit_the_format_are_refused(
    images: np.ndarray, labels: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode(images, labels)
