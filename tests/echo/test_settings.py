"""Bad arguments: one clear error that names the value and what was expected."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import stretto
from tests.echo.sources import Numbers, epoch, id_batches

TYPE, VALUE = TypeError, ValueError

BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"factor": 0.99}, VALUE, r"factor=0\.99: expected a finite number >= 1"),
    ({"factor": 0}, VALUE, "factor=0: expected"),
    ({"factor": -2}, VALUE, "factor=-2: expected"),
    ({"factor": math.nan}, VALUE, "factor=nan: expected"),
    ({"factor": math.inf}, VALUE, "factor=inf: expected"),
    ({"factor": np.float32("nan")}, VALUE, "factor=nan: expected"),
    ({"factor": "Auto"}, VALUE, "factor='Auto': expected a number >= 1 or \"auto\""),
    ({"factor": "2"}, VALUE, "factor='2': expected"),
    ({"factor": True}, TYPE, "factor=True is a bool: expected"),
    ({"factor": None}, TYPE, "factor=None is a NoneType: expected"),
    ({"factor": [2]}, TYPE, r"factor=\[2\] is a list: expected"),
    ({"unit": "examples"}, VALUE, 'unit=\'examples\': expected "example" or "batch"'),
    ({"buffer": 0}, VALUE, "buffer=0: expected a number of items >= 1, or bytes"),
    ({"buffer": -1}, VALUE, "buffer=-1: expected"),
    ({"buffer": ""}, VALUE, "buffer='': expected"),
    ({"buffer": "12 parsecs"}, VALUE, "buffer='12 parsecs': expected"),
    ({"buffer": "0GiB"}, VALUE, "buffer='0GiB': expected"),
    ({"buffer": "-1GiB"}, VALUE, "buffer='-1GiB': expected"),
    ({"buffer": "512"}, VALUE, "buffer='512': expected"),
    ({"buffer": "2IB"}, VALUE, "buffer='2IB': expected"),
    ({"buffer": "nanGB"}, VALUE, "buffer='nanGB': expected"),
    ({"buffer": 2.5}, TYPE, r"buffer=2\.5 is a float: expected"),
    ({"buffer": True}, TYPE, "buffer=True is a bool: expected"),
    ({"augment": 3}, TYPE, "augment=3: expected a function"),
    ({"device": "abacus"}, VALUE, "device='abacus': expected"),
    ({"max_factor": 4}, VALUE, r"max_factor=4 has no effect with factor=2\.0"),
    ({"factor": "auto", "max_factor": 0}, VALUE, "max_factor=0: expected an integer >= 1"),
    ({"factor": "auto", "max_factor": 2.5}, TYPE, r"max_factor=2\.5 is a float: expected"),
    ({"updates_per_epoch": 0}, VALUE, "updates_per_epoch=0: expected an integer >= 1"),
    ({"updates_per_epoch": "9"}, TYPE, "updates_per_epoch='9' is a str: expected"),
    ({"updates_per_epoch": 9, "carry_over": False}, VALUE, "updates_per_epoch=9 with carry_over=False"),
    ({"seed": 1.5}, TYPE, r"seed=1\.5 is a float: expected an integer"),
    ({"seed": None}, TYPE, "seed=None is a NoneType: expected an integer"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_a_bad_argument_raises_at_once_and_is_named(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        stretto.echo(id_batches(2, 2), **arguments)


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (iter([torch.zeros(2)]), "list_iterator"),
        ((batch for batch in [torch.zeros(2)]), "generator"),
        (map(torch.zeros, [2]), "map"),
        (DataLoader, "type"),
        (5, "int"),
        (None, "NoneType"),
    ],
)
def test_a_loader_that_cannot_be_iterated_again_raises(loader: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"loader is a {name}: expected a re-iterable such as a DataLoader"):
        stretto.echo(loader)


class Resettable:
    """Like DALI's loaders (with auto_reset=True): its own iterator, but it starts again after its end."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> "Resettable":
        return self

    def reset(self) -> None:
        self.at = 0

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        if self.at == 3:
            self.reset()
            raise StopIteration
        self.at += 1
        return [{"data": torch.tensor([2 * self.at, 2 * self.at + 1])}]


def test_a_loader_that_is_its_own_iterator_but_can_be_reset_is_accepted() -> None:
    with stretto.echo(Resettable(), 2, carry_over=False) as loader:
        for _ in range(2):
            items = sorted(item for (batch,) in loader for item in batch["data"].tolist())
            assert items == sorted([2, 3, 4, 5, 6, 7] * 2)


@pytest.mark.parametrize("epoch_number", [-1, 1.0, True, "1"])
def test_a_bad_epoch_raises(epoch_number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"epoch={epoch_number!r}"):
        stretto.echo(id_batches(2, 2)).set_epoch(epoch_number)


ROWS = [torch.zeros(4, 3) for _ in range(3)]  # 48 bytes a batch


@pytest.mark.parametrize(
    ("unit", "buffer", "message"),
    [
        ("example", 3, "buffer=3 is smaller than one batch of 4 items and 48 bytes"),
        ("example", "47B", "buffer=47 bytes is smaller than one batch of 4 items and 48 bytes"),
        ("batch", "47B", "buffer=47 bytes is smaller than one batch of 1 items and 48 bytes"),
    ],
)
def test_a_buffer_smaller_than_one_batch_raises(unit: Any, buffer: Any, message: str) -> None:
    with stretto.echo(ROWS, unit=unit, buffer=buffer) as loader, pytest.raises(ValueError, match=message):
        list(loader)


def test_a_later_batch_above_the_bound_raises() -> None:
    source = [torch.zeros(4, 3), torch.zeros(5, 3)]
    with stretto.echo(source, 1, unit="batch", buffer="48B") as loader, pytest.raises(ValueError, match="60 bytes"):
        list(loader)


@pytest.mark.parametrize("factor", [1, np.int64(2), np.float32(2.5), "auto"])
@pytest.mark.parametrize("buffer", [None, 6, np.int32(6), "1 KB", " 1.5kib ", "2MiB", ".5MB", "96b"])
def test_good_sizes_and_factors_are_accepted(factor: Any, buffer: Any) -> None:
    with stretto.echo(ROWS, factor, buffer=buffer, updates_per_epoch=3) as loader:
        assert len(epoch(loader)) == 3


@pytest.mark.parametrize("seed", [-1, 0, 2**64, np.int64(7)])
def test_any_integer_is_a_seed(seed: Any) -> None:
    with stretto.echo(DataLoader(Numbers(6), 2, shuffle=True), 1, carry_over=False, seed=seed) as loader:
        assert sorted(item for batch in epoch(loader) for item in batch) == list(range(6))
