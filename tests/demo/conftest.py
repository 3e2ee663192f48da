"""One real object store and Fashion-MNIST for all tests of this folder."""

from collections.abc import Iterator

import pytest

from stretto.demo.fashion import FashionMNIST, load_fashion_mnist
from stretto.demo.server import ObjectStore


@pytest.fixture(scope="session")
def fashion() -> FashionMNIST:
    return load_fashion_mnist()


@pytest.fixture(scope="session")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as running:
        yield running
