from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.pipelining import Repairs, batch_rng, rng, simulate
from tests.pipelining.training import (
    Run,
    adamw,
    convolutions,
    falling,
    images,
    plain,
    rows,
    simulated,
    simulation_of,
)

PLAIN = {
    "dropout and batch norm": Run(options={"seed": 5}),
    "AdamW": Run(optimizer=adamw),
    "channels_last, in place": Run(layers=convolutions, epochs=[images(6)]),
    "accumulate": Run(options={"accumulate": 3}),
    "scheduler": Run(scheduler=falling, epochs=[rows(4), rows(3)]),
    "clip": Run(options={"clip": 0.1}),
    "autocast": Run(options={"autocast": torch.bfloat16}),
    "autocast of channels_last": Run(layers=convolutions, epochs=[images(4)], options={"autocast": torch.bfloat16}),
}


@pytest.mark.parametrize("run", PLAIN.values(), ids=PLAIN.keys())
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_without_staleness_every_bit_is_that_of_plain_training(run: Run, num_blocks: int) -> None:
    unstale = replace(run, options=run.options | {"m": (0,) * num_blocks})
    simulated(unstale, num_blocks).check_is(plain(run, num_blocks))


def test_one_block_is_plain_training_by_default() -> None:
    simulated(Run(), 1).check_is(plain(Run(), 1))


def test_kept_graphs_without_staleness_are_plain_training() -> None:
    run = Run(options={"m": (0, 0, 0), "backward_params": "stashed"})
    simulated(run, 3).check_is(plain(run, 3))


def test_without_staleness_the_number_of_blocks_does_not_matter_to_dropout() -> None:
    one, *others = (simulated(Run(options={"m": (0,) * k, "seed": 3}), k) for k in (1, 2, 4, 8))
    for other in others:
        merged = [value for state in other.state for value in state.values()]
        assert all(map(torch.equal, merged, one.state[0].values()))
        assert other.losses == one.losses


def test_delayed_sgd_on_a_regression_is_its_closed_form() -> None:
    # w_{j+1} = w_j - c w_{j-1}, w_{-1} = w_0 = 1 and c = 3/16: powers of the roots 3/4 and 1/4 of r^2 = r - c
    weight = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=3 / 32)
    simulation = simulate([weight, nn.Identity()], [optimizer, None], lambda y: y.square().sum())
    one = torch.ones(1, 1, dtype=torch.float64)
    weights = []
    for _ in range(12):
        simulation.step(one)
        weights.append(weight.weight.item())
    assert weights == [1.0, *((9 * 3**j - 1) / (8 * 4**j) for j in range(1, 12))]
    simulation.flush()
    assert weight.weight.item() == (9 * 3**12 - 1) / (8 * 4**12)


class Squared(nn.Module):
    """x -> a * a * x, whose gradient depends on a."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * self.a * x


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("backward_params", ["current", "stashed"])
def test_two_stale_blocks_follow_the_recursion(m: int, backward_params: str) -> None:
    rate, xs, ts = 0.02, [1.0, -0.5, 0.75, 1.25, -1.0, 0.5], [0.5, 0.25, -1.0, 0.75, 0.0, 1.0]
    a, b = [0.9], [1.1]  # after 0, 1, ... updates
    for n, (x, t) in enumerate(zip(xs, ts, strict=True)):
        forward = a[max(0, n - m)]  # iteration n runs forward before its backward
        h = forward**2 * x
        error = b[n] ** 2 * h - t
        b.append(b[n] - rate * 2 * error * 2 * b[n] * h)
        gradient = 2 * error * b[n] ** 2
        at = a[n] if backward_params == "current" else forward  # batch n's own backward: n updates are done
        a.append(a[n] - rate * gradient * 2 * at * x)
    blocks = [Squared(0.9), Squared(1.1)]
    optimizers = [torch.optim.SGD(block.parameters(), lr=rate) for block in blocks]
    simulation = simulate(
        blocks, optimizers, lambda y, t: (y - t).square(), m=(m, 0), backward_params=backward_params
    )
    for x, t in zip(xs, ts, strict=True):
        simulation.step(torch.tensor(x, dtype=torch.float64), torch.tensor(t, dtype=torch.float64))
    simulation.flush()
    assert blocks[0].a.item() == pytest.approx(a[-1], rel=1e-13)
    assert blocks[1].a.item() == pytest.approx(b[-1], rel=1e-13)


@pytest.mark.parametrize("backward_params", ["current", "stashed"])
@pytest.mark.parametrize("flush_between", [True, False])
@pytest.mark.parametrize("predict", [True, False])
def test_every_batch_norm_counts_every_batch_once(backward_params: str, flush_between: bool, predict: bool) -> None:
    run = Run(
        epochs=[rows(5), rows(1), rows(7)],
        flush_between=flush_between,
        options={"p": 1, "backward_params": backward_params, "repairs": Repairs(predict=predict)},
    )
    result = simulated(run, 4)
    counts = [v.item() for state in result.state for name, v in state.items() if "num_batches" in name]
    assert counts == [13, 13]
    assert result.num_updates == [13] * 4


def test_the_random_numbers_of_the_process_are_left_alone() -> None:
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    blocks = Run().make_blocks(2)
    torch.manual_seed(4)
    simulation = simulate(blocks, [Run().make_optimizer(b) for b in blocks], functional.cross_entropy)
    for x, y in rows(3):
        simulation.step(x, y)
    simulation.flush()
    assert torch.equal(torch.rand(2), expected)


def test_a_batch_begins_with_the_same_random_numbers_whatever_came_before() -> None:
    with batch_rng(1, 2):
        first = torch.rand(2)
    torch.rand(3)
    with batch_rng(1, 2):
        assert torch.equal(torch.rand(2), first)
    with batch_rng(1, 3):
        assert not torch.equal(torch.rand(2), first)


class Accelerator:
    """One that is not used at first."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.is_used = False

    def get_rng_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def draw(self) -> float:
        return torch.rand((), generator=self.generator).item()


def test_a_batch_keeps_its_numbers_on_an_accelerator_that_only_some_blocks_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator()
    monkeypatch.setattr(rng, "_accelerator_is_used", lambda: accelerator.is_used)
    monkeypatch.setattr(torch, "get_device_module", lambda: accelerator)

    def enter(n: int) -> rng.RngState:
        accelerator.is_used = False
        with batch_rng(1, n):
            return rng.get_state()

    drawn = []
    for n in (0, 1, 0):
        state = enter(n)
        accelerator.is_used = True
        rng.set_state(state)
        drawn.append(accelerator.draw())
        state = rng.get_state(state)
        accelerator.is_used = False  # the next block is on the host
        rng.set_state(state)
        state = rng.get_state(state)
        accelerator.is_used = True
        rng.set_state(state)
        drawn.append(accelerator.draw())
    assert drawn[:2] == drawn[4:]
    assert len(set(drawn)) == 4


def test_weights_that_were_cast_before_an_update_are_not_used_after_it() -> None:
    run = Run(options={"autocast": torch.bfloat16})
    expected = simulated(run, 3)
    with torch.autocast("cpu", torch.bfloat16):  # around the loop, which keeps what is cast inside
        simulated(run, 3).check_is(expected)


def test_an_update_uses_its_own_rate_on_every_block_however_late() -> None:
    used: dict[int, list[float]] = {}

    class Noting(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            used.setdefault(id(self), []).append(self.param_groups[0]["lr"])
            super().step()

    run = Run(optimizer=lambda p: Noting(p, lr=0.5), scheduler=falling, epochs=[rows(4)], options={"p": 1})
    simulated(run, 3)
    assert list(used.values()) == [[0.5, 0.25, 0.5 / 3, 0.125]] * 3


def test_an_unfinished_group_is_applied_by_flush() -> None:
    run = Run(epochs=[rows(7)], options={"accumulate": 3})
    assert simulated(run, 3).num_updates == [3, 3, 3]


def test_a_loader_may_fill_the_same_tensor_again() -> None:
    batches = rows(6, last=4)
    x, y = (torch.empty_like(each) for each in batches[0])

    def filling() -> object:
        for value, target in batches:
            x.copy_(value)
            y.copy_(target)
            yield x, y

    simulated(Run(epochs=[filling()]), 3).check_is(simulated(Run(epochs=[batches]), 3))


def test_evaluation_touches_nothing() -> None:
    def train(evaluate: bool) -> list[torch.Tensor]:
        simulation = simulation_of(Run())
        for x, y in rows(6):
            if evaluate:
                simulation.eval(x)
            simulation.step(x, y)
            if evaluate:
                simulation.eval(x)
        simulation.flush()
        return [value for block in simulation.blocks for value in block.module.state_dict().values()]

    assert all(map(torch.equal, train(True), train(False)))


def test_evaluation_is_that_of_the_whole_model_in_eval_mode() -> None:
    simulation = simulation_of(Run())
    blocks = [block.module for block in simulation.blocks]
    [(x, y)] = rows(1)
    simulation.step(x, y)
    found = simulation.eval(x)
    assert all(part.training for block in blocks for part in block.modules())
    assert torch.equal(found, nn.Sequential(*blocks).eval()(x))
