"""What users do to blocks, loaders and loops that a pipeline must survive, or refuse in words."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from stretto.pipelining import Repairs, ScheduleDSP, Staleness, simulate
from tests.pipelining.processes import Pool
from tests.pipelining.training import rows

DATA = rows(6)


@dataclass
class Unknown:
    hidden: torch.Tensor


@dataclass
class Checked:
    hidden: torch.Tensor

    def __post_init__(self) -> None:
        assert self.hidden.dim() == 2


pytree.register_dataclass(Checked)


class Wrap(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.inner(x))


class Unwrap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, wrapped: Any) -> torch.Tensor:
        return self.inner(wrapped.hidden)


class Counting(nn.Module):
    """Counts its passes in a buffer made by the first, and in a frozen weight; writes to its input unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.average = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("seen", None)
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average += 1
            self.unsaved += 1
            self.seen = torch.ones(1) if self.seen is None else self.seen + 1
        x.data.mul_(0.5)
        return self.inner(x)


def trained(blocks: list[nn.Module], data: Any = DATA, **options: Any) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    for parameter in (p for block in blocks for p in block.parameters() if p.requires_grad):
        nn.init.normal_(parameter)
    trainable = [[p for p in b.parameters() if p.requires_grad] for b in blocks]
    optimizers = [torch.optim.SGD(some, lr=0.1, momentum=0.9, nesterov=True) for some in trainable]
    run = simulate(blocks, optimizers, functional.cross_entropy, **options)
    for x, y in run.feed(data):
        run.step(x, target=y)
    run.flush()
    return [block.state_dict() for block in blocks]


def test_tensors_that_no_gradient_would_reach_are_refused_and_registered_classes_pass() -> None:
    with pytest.raises(TypeError, match="passes between two blocks as a Unknown, and the tensors it holds"):
        trained([Wrap(Unknown), Unwrap()])
    assert trained([Wrap(Checked), Unwrap()], m=0)[0]["inner.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("backward_params", "repairs"), [("current", None), ("stashed", None), ("current", Repairs(predict=True))]
)
def test_what_a_pass_counts_is_counted_once_a_batch_and_its_input_stays(
    backward_params: str, repairs: Repairs | None
) -> None:
    counting = Counting()
    stale = trained([counting, nn.Linear(4, 4)], m=(2, 0), backward_params=backward_params, repairs=repairs)[0]
    assert (stale["average"], stale["seen"], counting.unsaved) == (6, 6, 6)
    assert all(torch.equal(x, fresh) for (x, _), (fresh, _) in zip(DATA, rows(6), strict=True))


@pytest.mark.parametrize("backward_params", ["current", "stashed"])
def test_buffers_that_no_state_dict_has_go_on_from_a_state(backward_params: Any) -> None:
    runs = []
    for _ in range(2):
        blocks = [Counting(), nn.Linear(4, 4)]
        for block in blocks:
            torch.manual_seed(0)
            block.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)
        optimizers = [torch.optim.SGD([p for p in b.parameters() if p.requires_grad], lr=0.1) for b in blocks]
        run = simulate(blocks, optimizers, functional.cross_entropy, backward_params=backward_params)
        runs.append((run, blocks[0]))
    (first, counted), (second, resumed) = runs
    for run in (first, second):
        run.step(*DATA[0])
        run.step(*DATA[1])
    resumed.unsaved.zero_()
    second.load_state_dict(first.state_dict())
    assert torch.equal(resumed.unsaved, counted.unsaved)
    assert torch.equal(resumed.average, counted.average)


def test_a_loader_that_fills_one_array_again_trains_as_one_that_does_not() -> None:
    class FromArray(nn.Linear):
        def forward(self, x: np.ndarray) -> torch.Tensor:
            return super().forward(torch.from_numpy(x))

    def filling() -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        array = np.empty((4, 6), np.float32)
        for x, y in rows(6, last=4):
            array[:] = x.numpy()
            yield array, y

    fresh = [(x.numpy(), y) for x, y in rows(6, last=4)]
    one, other = (trained([FromArray(6, 4), nn.Linear(4, 4)], data, m=(3, 0)) for data in (filling(), fresh))
    assert torch.equal(one[0]["weight"], other[0]["weight"])


def test_gradients_from_before_training_are_forgotten() -> None:
    block, other = nn.Linear(6, 4), nn.Linear(6, 4)
    block.weight.grad = torch.ones(4, 6)
    assert torch.equal(trained([block])[0]["weight"], trained([other])[0]["weight"])


def test_a_gradient_that_shares_memory_with_a_weights_own_is_copied_before_it_is_sent(pool: Pool) -> None:
    for weights in pool.run(clipped, 2):
        assert all(torch.equal(mine, expected) for mine, expected in weights)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1) + self.weight.view(-1)).view(4, 6)


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Sequential(Shared(), nn.Linear(6, 4))]


def clipped(rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    blocks = make_blocks()
    options = {"clip": 1e-3, "m": (1, 0)}
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in blocks]
    alone = simulate(blocks, optimizers, functional.cross_entropy, **options)
    mine = make_blocks()[rank]
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    with ScheduleDSP((mine, rank, 2), optimizer, functional.cross_entropy, **options) as schedule:
        for run in (alone, schedule):
            for x, y in run.feed(rows(8, last=4) if run is alone or rank == 0 else None):
                run.step(x, target=y)
            run.flush()
    return list(zip(mine.parameters(), blocks[rank].parameters(), strict=True))


def test_a_tuple_is_spread_over_arguments_with_defaults_too() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x if mask is None else x * mask)

    data = [((x, torch.zeros_like(x)), y) for x, y in DATA]
    with_mask, without = trained([Masked(6, 4)], data)[0], trained([Masked(6, 4)])[0]
    assert not torch.equal(with_mask["weight"], without["weight"])


def test_what_cannot_train_is_refused_in_words() -> None:
    model = nn.Linear(6, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(ValueError, match="loss_fn=Sequential has weights that no block would train"):
        simulate([model], [sgd], loss)
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric"):
        simulate([model], [sgd], lr_scheduler=[torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)])
    with pytest.raises(ValueError, match="LBFGS computes the loss several times"):
        simulate([model], [torch.optim.LBFGS(model.parameters())])
    with pytest.raises(TypeError, match="expected a list, with one for each of 1 blocks"):
        simulate([model], sgd)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"loss_fn=CrossEntropyLoss: expected a function, such as CrossEntropyLoss\(\)"
    ):
        simulate([model], [sgd], nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match=r"expected a Repairs"):
        simulate([model], [sgd], repairs={"predict": True})  # type: ignore[arg-type]


def test_a_simulation_does_not_go_on_after_a_step_that_failed() -> None:
    blocks = [nn.Linear(6, 4), nn.Linear(4, 4)]
    run = simulate(blocks, [torch.optim.SGD(b.parameters(), lr=0.1) for b in blocks], functional.cross_entropy)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run.step(torch.zeros(2, 5), target=torch.zeros(2, dtype=torch.long))
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        run.state_dict()
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        run.step(*DATA[0])


def test_m_is_also_read_from_its_text() -> None:
    assert Staleness.of(3, m="DSP(1,1,0; 4,2,0)") == Staleness.dsp(3)


LOOPS = {
    "break, then eval": None,
    "skips a pair": r"asked for the batch after 0 before step\(\) took that",
    "one step more": "expected",
    "fails before it trains": "the validation broke",
}


def loop(rank: int, world: int, name: str) -> str:
    block = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    try:
        with ScheduleDSP((block, rank, 2), optimizer, functional.cross_entropy) as schedule:
            if name == "fails before it trains" and rank == 1:
                raise OSError("the validation broke")
            for at, (x, y) in enumerate(schedule.feed(DATA if rank == 0 else None)):
                if name == "skips a pair" and rank == 1:
                    continue
                schedule.step(x, target=y)
                if name == "break, then eval" and at == 2:
                    break
            if name == "break, then eval":
                schedule.eval(DATA[0][0] if rank == 0 else None)
            if name == "one step more" and rank == 1:
                schedule.step()
            schedule.flush()
    except Exception as error:
        return str(error)
    return f"{schedule.block.num_updates} updates"


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_differ_end_in_all_processes(name: str, pool: Pool) -> None:
    told = pool.run(loop, 2, name)
    if LOOPS[name] is None:
        assert told == ["3 updates"] * 2
    else:
        assert all(re.search(LOOPS[name], text) for text in told), told
