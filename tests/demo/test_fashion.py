import gzip
from pathlib import Path

import numpy as np
import pytest

from stretto.demo.fashion import FashionMNIST, load_fashion_mnist

NAMES = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
]


def test_fashion_mnist_has_its_published_shapes_and_classes(fashion: FashionMNIST) -> None:
    assert fashion.train_images.shape == (60_000, 28, 28)
    assert fashion.test_images.shape == (10_000, 28, 28)
    assert np.bincount(fashion.train_labels).tolist() == [6_000] * 10
    assert np.bincount(fashion.test_labels).tolist() == [1_000] * 10
    assert fashion.train_images.dtype == np.uint8


def test_folder_without_the_files_is_an_error_that_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_FASHION_MNIST", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        load_fashion_mnist()
    assert all(name in str(error.value) for name in [*NAMES, str(tmp_path)])


@pytest.mark.parametrize(
    "content", [gzip.compress(b"other", mtime=0), b"no gzip", gzip.compress(b"other", mtime=0)[:-9], b""]
)
def test_file_with_other_content_is_an_error_that_names_it(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("STRETTO_FASHION_MNIST", str(tmp_path))
    with pytest.raises(ValueError, match=rf"{NAMES[0]} \({len(content)} bytes\) is not the published file"):
        load_fashion_mnist()
