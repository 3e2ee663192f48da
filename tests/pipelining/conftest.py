"""Processes that the tests share, and one thread in each, so that all compute the same bits."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.pipelining.processes import Pool

os.environ["GLOO_SOCKET_IFNAME"] = "lo"


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(found)
