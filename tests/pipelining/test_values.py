"""Whatever passes between blocks: as in the simulator, and as in the plain model without staleness."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.pipelining.processes import Pool
from tests.pipelining.training import Run, adamw, joined, part, plain, rows, simulated


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


class Spreading(nn.Module):
    """Gives a tree of all kinds of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.table = nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        if self.training:
            self.seen += 1
        y = self.linear(x)
        return {
            "y": y,
            "transposed": y.t(),
            "every second": y[:, ::2],
            "expanded": y[:, :1].expand(-1, 5),
            "pair": Pair(y.sum(1), (y.double(), y.bfloat16(), torch.complex(y, -y).conj())),
            "mask": y > 0,
            "tokens": y.argmax(1),
            "none": None,
            "number": len(x),
            "text": "a text",
            "empty": y[:0],
            "scalar": y.mean(),
            "weights": self.table,
            "some weights": self.table.view(2, 4)[0],
            "buffer": self.seen,
            "unused": y * 2,
        }


class Gathering(nn.Module):
    """Uses all of it but one; gives two tensors and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: dict[str, Any]) -> tuple[torch.Tensor, Pair, torch.Tensor]:
        left, (double, half, number) = x["pair"]
        total = self.linear(x["y"] * x["mask"]) * x["weights"] + x["transposed"].t() + x["scalar"]
        total = total + left[:, None] + double.float() + half.float() + number.real + number.imag
        total = total + x["expanded"].sum(1, keepdim=True) + functional.one_hot(x["tokens"], 8) / x["number"]
        total = total + x["empty"].sum() + x["buffer"].sum() / 10
        assert x["none"] is None
        assert x["text"] == "a text"
        return total[:, :4] / 9, Pair(total[:, 4:].tanh(), [x["every second"], x["some weights"]]), x["mask"]


class Several(nn.Module):
    """Takes what the block before gives as its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, left: torch.Tensor, pair: Pair, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert mask is not None
        return self.linear(left) + pair.left + pair.right[0] * mask[:, :4] + pair.right[1]


def nested() -> list[nn.Module]:
    return [Spreading(), Gathering(), Several()]


class Last(nn.Module):
    """An LSTM's output at the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True, num_layers=2, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


def sentences() -> list[tuple[Any, Any]]:
    """Tokens, in batches of changing lengths and sizes."""
    made = torch.Generator().manual_seed(3)
    return [
        (torch.randint(0, 9, (size, length), generator=made), torch.randint(0, 4, (size,), generator=made))
        for size, length in ((4, 3), (2, 7), (4, 1), (1, 5), (3, 3), (4, 2))
    ]


def recurrent() -> list[nn.Module]:
    return [nn.Embedding(9, 6), Last(), nn.Linear(6, 4)]


def recurrent_at_the_end() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6)),
        nn.Dropout(0.3),
        nn.Sequential(Last(), nn.Linear(6, 4)),
    ]


def frozen(at: int) -> list[nn.Module]:
    blocks = [nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)), nn.Linear(8, 4)]
    blocks[at].requires_grad_(False)
    return blocks


class TokensOf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(1)


def without_parameters() -> list[nn.Module]:
    return [nn.Sequential(nn.Tanh()), nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)]


def without_a_gradient() -> list[nn.Module]:
    return [nn.Linear(6, 8).requires_grad_(False), TokensOf(), nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 4))]


class Many(nn.Module):
    """Gives more than the first message of a batch has room for."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"a rather long name {at}": x * at for at in range(200)} | {"large": x[:, :1].repeat(1, 5000)}


class Sum(nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([value.mean() for value in x.values()]).sum()


def large() -> list[nn.Module]:
    return [nn.Linear(6, 8), Many(), Sum()]


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.add_(1))


def in_place() -> list[nn.Module]:
    return [nn.Linear(6, 8), AddsInPlace(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 4))]


def first_in_place() -> list[nn.Module]:
    return [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 8)), nn.Linear(8, 4)]


class Shift(nn.Module):
    """Its weight and its input have the very same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def shifts() -> list[nn.Module]:
    return [nn.Linear(6, 6), Shift(), nn.Sequential(Shift(), nn.Linear(6, 4))]


def to_dict_target(batches: list[Any]) -> list[Any]:
    return [(x, {"labels": y, "weight": 2, "none": None}) for x, y in batches]


def dict_loss(output: torch.Tensor, target: dict[str, Any]) -> torch.Tensor:
    return functional.cross_entropy(output, target["labels"]) * target["weight"]


RUNS = {
    "nested": Run(blocks=nested),
    "recurrent": Run(blocks=recurrent, epochs=[sentences()], optimizer=adamw),
    "recurrent at the end": Run(blocks=recurrent_at_the_end, epochs=[sentences()]),
    "first frozen": Run(blocks=partial(frozen, 0)),
    "middle frozen": Run(blocks=partial(frozen, 1)),
    "last frozen": Run(blocks=partial(frozen, 2)),
    "without parameters": Run(blocks=without_parameters),
    "without a gradient": Run(blocks=without_a_gradient),
    "large": Run(blocks=large, epochs=[[(x, None) for x, _ in rows(5)]], loss_fn=None),
    "in place": Run(blocks=in_place),
    "first in place": Run(blocks=first_in_place),
    "shared gradients": Run(blocks=shifts, epochs=[rows(6, last=4)]),
    "dict as target": Run(blocks=in_place, epochs=[to_dict_target(rows(6))], loss_fn=dict_loss),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize(
    "options",
    [{"p": 1, "clip": 0.01}, {"backward_params": "stashed", "accumulate": 2}],
    ids=["current, clipped", "stashed, accumulated"],
)
def test_processes_compute_what_the_simulator_does(pool: Pool, run: Run, options: dict[str, Any]) -> None:
    run = replace(run, options=options)
    num_blocks = len(run.make_blocks(0))
    joined(pool.run(part, num_blocks, run)).check_is(simulated(run, num_blocks))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_without_staleness_all_of_it_trains_as_the_plain_model(run: Run) -> None:
    num_blocks = len(run.make_blocks(0))
    run = replace(run, options={"clip": 0.01})
    unstale = replace(run, options=run.options | {"m": (0,) * num_blocks})
    simulated(unstale, num_blocks).check_is(plain(run, num_blocks))
