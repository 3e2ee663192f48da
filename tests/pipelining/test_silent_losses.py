"""What would train otherwise than the plain model without a word is refused, or done right."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.pipelining import Repairs, ScheduleDSP, partition, simulate
from tests.pipelining.processes import Pool
from tests.pipelining.training import rows

DATA = rows(6, last=4)


def blocks_of_two() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 4), nn.Linear(4, 4)]


def sgd(blocks: list[nn.Module], **options: Any) -> list[torch.optim.SGD]:
    trained = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
    return [torch.optim.SGD(some, lr=0.1, **options) for some in trained]


def train(blocks: list[nn.Module], loss_fn: Any = functional.cross_entropy, **options: Any) -> None:
    run = simulate(blocks, sgd(blocks), loss_fn, **options)
    for x, y in run.feed(DATA):
        run.step(x, target=y)
    run.flush()


@pytest.mark.parametrize("m", [0, (2, 0)])
def test_a_loss_that_reaches_for_other_blocks_weights_is_refused(m: Any) -> None:
    blocks = blocks_of_two()

    def penalised(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target) + sum(
            p.square().sum() for b in blocks for p in b.parameters()
        )

    with pytest.raises(RuntimeError, match=r"block 1 or its loss uses a parameter of shape"):
        train(blocks, penalised, m=m)


def penalise(rank: int, world: int) -> str:
    model = nn.Sequential(*blocks_of_two())

    def penalised(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target) + sum(p.square().sum() for p in model.parameters())

    block = partition(model, world, by="uniform")[rank]
    schedule = ScheduleDSP((block, rank, world), *sgd([block]), penalised)
    try:
        for x, y in schedule.feed(DATA):
            schedule.step(x, target=y)
    except RuntimeError as error:
        return str(error)
    return ""


def test_so_it_is_in_processes(pool: Pool) -> None:
    assert all("block 1 or its loss uses a parameter of shape" in text for text in pool.run(penalise, 2))


@torch.no_grad()
def blind(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def share_wrong(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) != target).float().mean()


@pytest.mark.parametrize("loss_fn", [blind, share_wrong])
def test_a_loss_without_a_graph_is_refused(loss_fn: Any) -> None:
    with pytest.raises(RuntimeError, match="the loss of block 1 has no graph, so that nothing would be trained"):
        train(blocks_of_two(), loss_fn)


@dataclass(slots=True)
class Slots:
    values: torch.Tensor


class Row(tuple):
    """A class of its own, with its tensors in its elements."""


class Holder:
    def __init__(self, part: Any) -> None:
        self.part = part


class Hiding(nn.Module):
    def __init__(self, hide: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.hide = hide

    def forward(self, x: torch.Tensor) -> Any:
        return self.hide(self.inner(x))


@pytest.mark.parametrize(
    "hide",
    [
        Slots,
        lambda values: Row((values,)),
        lambda values: Holder(Holder([values])),
        lambda values: torch.distributions.Independent(torch.distributions.Normal(values, 1.0), 1),
    ],
    ids=["slots", "a tuple's subclass", "deep", "a distribution"],
)
@pytest.mark.parametrize("m", [0, (2, 0)])
def test_tensors_are_found_however_deep_an_object_hides_them(hide: Any, m: Any) -> None:
    with pytest.raises(TypeError, match="and the tensors it holds would get no gradient"):
        train([Hiding(hide), nn.Linear(4, 4)], m=m)


def test_what_cannot_travel_is_refused_in_the_simulation_too() -> None:
    with pytest.raises(TypeError, match="which cannot be pickled"):
        train([Hiding(lambda values: (values, lambda: 0)), nn.Linear(4, 4)])


class Numbering(nn.Module):
    """Writes to an array that it got."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen = seen

    def forward(self, x: torch.Tensor, number: np.ndarray) -> torch.Tensor:
        number += 1
        self.seen.append(int(number))
        return self.inner(x)


def test_an_array_that_a_block_changes_comes_unchanged_to_the_recompute() -> None:
    seen: list[int] = []
    train([Hiding(lambda values: (values, np.array(0))), Numbering(seen), nn.Linear(4, 4)])
    assert seen == [1] * 12


class LateAverage(nn.Module):
    """A frozen average that begins with the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.average = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls > 2:
            with torch.no_grad():
                self.average += 1
        return self.inner(x)


def test_a_frozen_weight_that_a_forward_begins_to_write_to_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"block 0 wrote to its frozen weights \['average'\]"):
        train([LateAverage(), nn.Linear(4, 4)], m=(2, 0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def test_a_frozen_weight_that_changes_under_a_kept_graph_is_named_as_the_cause() -> None:
    blocks = [Scaled(), nn.Linear(4, 4)]
    run = simulate(blocks, sgd(blocks), functional.cross_entropy, m=(2, 0), backward_params="stashed")
    for x, y in DATA[:2]:
        run.step(x, target=y)
    blocks[0].scale.add_(1)
    with pytest.raises(RuntimeError) as raised:
        run.step(*DATA[2])
    assert "block 0 keeps the graphs of 2 batches (backward_params='stashed')" in raised.value.__notes__[0]


def test_an_optimizer_may_change_its_own_rate() -> None:
    weights = []
    for simulated in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        [optimizer] = sgd([model])
        optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.05))
        run = simulate([model], [optimizer], functional.cross_entropy) if simulated else None
        for x, y in DATA:
            if run:
                run.step(x, target=y)
            else:
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_training_works_where_gradients_are_off_around_it() -> None:
    blocks, others = blocks_of_two(), blocks_of_two()
    train(blocks, accumulate=2)
    with torch.no_grad():
        train(others, accumulate=2)
    assert torch.equal(blocks[0].weight, others[0].weight)
    refused = pytest.raises(
        RuntimeError, match=r"step\(\) in torch.inference_mode\(\), where nothing can be trained"
    )
    with torch.inference_mode(), refused:
        train(others)


def train_sparse(rank: int, world: int) -> torch.Tensor:
    torch.manual_seed(0)
    blocks = [nn.Identity(), nn.EmbeddingBag(6, 4, sparse=True, mode="sum")]
    schedule = ScheduleDSP((blocks[rank], rank, world), [None, *sgd(blocks[1:])][rank], _sum, accumulate=2)
    for x, y in schedule.feed([(torch.tensor([[n % 6, 1]]), torch.tensor(0)) for n in range(4)]):
        schedule.step(x, target=y)
    schedule.flush()
    return blocks[1].weight.detach()


def _sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


def test_sparse_gradients_may_be_open_while_messages_go(pool: Pool) -> None:
    torch.manual_seed(0)
    start = nn.EmbeddingBag(6, 4, sparse=True, mode="sum").weight
    expected = start - 0.1 * torch.tensor([1.0, 5.0, 1.0, 1.0, 0.0, 0.0])[:, None] / 2
    assert torch.allclose(pool.run(train_sparse, 2)[1], expected)


def test_modules_that_cannot_be_blocks_are_refused() -> None:
    compiled = nn.Linear(6, 4)
    compiled._orig_mod = nn.Linear(6, 4)  # as torch.compile's wrapper has it, without importing the compiler
    with pytest.raises(TypeError, match=r"call block.compile\(\) instead"):
        simulate([compiled], sgd([compiled]))
    scripted = nn.Sequential(nn.Linear(6, 4), torch.jit.ScriptModule())
    with pytest.raises(TypeError, match=r"a part made by torch\.jit"):
        simulate([scripted, nn.Linear(4, 4)], sgd([scripted, nn.Linear(4, 4)]))
    patched = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    patched.forward = lambda x: x
    with pytest.raises(ValueError, match="parameters, buffers or another forward"):
        partition(patched, 2, by="uniform")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"seed": None}, "seed=None: expected a whole number"),
        ({"clip": True}, "clip=True: expected a norm above 0"),
        ({"clip": "1"}, "clip='1': expected a norm above 0"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        train(blocks_of_two(), **options)


@pytest.mark.parametrize("repair", [{"discount": float("nan")}, {"predict": "no"}, {"warmup": 2.5}])
def test_repairs_of_another_type_are_refused(repair: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"{next(iter(repair))}="):
        Repairs(**repair)
