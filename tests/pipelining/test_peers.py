"""DGL and DNI: blocks that train on a gradient of their own."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from stretto.pipelining.peers import GreedyTraining, LocalTraining, SyntheticGradients
from stretto.pipelining.rng import batch_rng

mse = nn.functional.mse_loss


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)) for _ in range(count)]


def make_blocks(*widths: int) -> list[nn.Sequential]:
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Dropout(0.3)) for a, b in itertools.pairwise(widths)
    ]


def sgd(modules: list[nn.Module]) -> list[Optimizer]:
    return [SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True) for module in modules]


def weights(*modules: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def two_blocks(kind: type[LocalTraining]) -> LocalTraining:
    blocks, auxiliaries = make_blocks(4, 3, 2), [nn.Linear(3, 2 if kind is GreedyTraining else 3)]
    return kind(blocks, auxiliaries, sgd(blocks), sgd(auxiliaries), mse)


@pytest.mark.parametrize("kind", [GreedyTraining, SyntheticGradients])
def test_one_block_is_plain_training_bit_for_bit(kind: type[LocalTraining]) -> None:
    [block], [plain] = make_blocks(4, 2), make_blocks(4, 2)
    optimizers, [optimizer] = sgd([block]), sgd([plain])
    trainer = kind(
        [block],
        [],
        optimizers,
        [],
        mse,
        lr_scheduler=[StepLR(optimizers[0], 3, 0.5)],
        auxiliary_lr_scheduler=[],
        seed=3,
    )
    scheduler = StepLR(optimizer, 3, 0.5)
    losses, expected = [], []
    for n, (x, y) in enumerate(trainer.feed(make_batches(10))):
        losses.append(trainer.step(x, target=y))
        with batch_rng(3, n):
            loss = mse(plain(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        expected.append(loss.detach())
    trainer.flush()
    assert_equal(losses, expected)
    assert_equal(weights(block), weights(plain))


def test_a_greedy_block_with_its_head_trains_as_a_network_of_its_own() -> None:
    blocks, heads = make_blocks(4, 3, 2), [nn.Linear(3, 2)]
    alone = nn.Sequential(*make_blocks(4, 3), nn.Linear(3, 2))
    alone[1].load_state_dict(heads[0].state_dict())
    [optimizer] = sgd([alone])
    trainer = GreedyTraining(blocks, heads, sgd(blocks), sgd(heads), mse)
    for n, (x, y) in enumerate(make_batches(10)):
        trainer.step(x, target=y)
        with batch_rng(0, n):
            mse(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(weights(blocks[0], heads[0]), weights(alone))


def test_a_block_trains_on_what_the_one_before_gave_before_its_update() -> None:
    first, second = nn.Linear(4, 3), nn.Linear(3, 2)
    [(x, y)] = make_batches(1)
    seen = first(x).detach()
    given = []
    second.register_forward_hook(lambda module, arguments, output: given.append(arguments[0].detach().clone()))
    heads = [nn.Linear(3, 2)]
    GreedyTraining([first, second], heads, sgd([first, second]), sgd(heads), mse).step(x, target=y)
    assert torch.equal(given[-1], seen)
    assert not torch.equal(first(x), seen)


@pytest.mark.parametrize("kind", [GreedyTraining, SyntheticGradients])
def test_no_gradient_crosses_a_boundary(kind: type[LocalTraining]) -> None:
    changed, unchanged = two_blocks(kind), two_blocks(kind)
    with torch.no_grad():
        changed.blocks[1].module[0].weight.mul_(5)
        for trainer in (changed, unchanged):
            trainer.auxiliaries[0].load_state_dict(
                {"weight": torch.ones(2 + (kind is not GreedyTraining), 3)}, False
            )
            trainer.auxiliaries[0].bias.fill_(0.5)
    [(x, y)] = make_batches(1)
    before = weights(changed.blocks[0].module)
    for trainer in (changed, unchanged):
        trainer.step(x, target=y)
    first = weights(changed.blocks[0].module)
    assert_equal(first, weights(unchanged.blocks[0].module))
    assert not torch.equal(first[0], before[0])


def test_a_synthetic_gradient_that_begins_at_zero_leaves_the_block_alone_once() -> None:
    trainer = two_blocks(SyntheticGradients)
    nn.init.zeros_(trainer.auxiliaries[0].weight)
    nn.init.zeros_(trainer.auxiliaries[0].bias)
    module = trainer.blocks[0].module
    before = module[0].weight.detach().clone()
    (x, y), (x1, y1) = make_batches(2)
    trainer.step(x, target=y)
    assert torch.equal(module[0].weight, before)
    trainer.step(x1, target=y1)
    assert not torch.equal(module[0].weight, before)


class Affine(nn.Module):
    """A gradient that is linear in the output and in the target."""

    def __init__(self) -> None:
        super().__init__()
        self.of_output, self.of_target = nn.Linear(3, 3, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.of_output(output) + self.of_target(target)


def test_synthetic_gradients_learn_the_gradient_of_a_linear_model() -> None:
    torch.manual_seed(2)
    first, last = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)
    last.requires_grad_(False)
    network = Affine()

    def half_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).sum(1).mean() / 2

    trainer = SyntheticGradients(
        [first, last],
        [network],
        [SGD(first.parameters(), lr=0), None],
        [SGD(network.parameters(), lr=1)],
        half_squared_error,
    )
    for x, y in make_batches(400):
        trainer.step(3 * x, target=y)
    # The gradient of a row is W'(W h - y).
    W = last.weight  # noqa: N806
    torch.testing.assert_close(network.of_output.weight, W.T @ W, rtol=0, atol=1e-4)
    torch.testing.assert_close(network.of_target.weight, -W.T, rtol=0, atol=1e-4)


def test_evaluation_is_the_whole_models_and_changes_nothing() -> None:
    trainer = two_blocks(GreedyTraining)
    [(x, y), (x1, _)] = make_batches(2)
    trainer.step(x, target=y)
    modules = [block.module for block in trainer.blocks]
    before = weights(*modules)
    found = trainer.eval(x1)
    assert_equal(weights(*modules), before)
    expected = nn.Sequential(*modules).eval()(x1)
    assert torch.equal(found, expected)


def test_a_boundary_of_two_tensors_has_no_synthetic_gradient() -> None:
    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x

    blocks, network = [Two(4, 3), nn.Bilinear(3, 4, 2)], nn.Linear(3, 3)
    trainer = SyntheticGradients(blocks, [network], sgd(blocks), sgd([network]), mse)
    [(x, y)] = make_batches(1)
    with pytest.raises(TypeError, match="block 0 gave a tuple"):
        trainer.step(x, target=y)


def test_a_synthetic_gradient_of_another_shape_is_refused() -> None:
    blocks, network = make_blocks(4, 3, 2), nn.Linear(3, 4)
    trainer = SyntheticGradients(blocks, [network], sgd(blocks), sgd([network]), mse)
    [(x, y)] = make_batches(1)
    with pytest.raises(ValueError, match=r"gave \[5, 4\] for an output of \[5, 3\]"):
        trainer.step(x, target=y)


def test_a_checkpoint_that_would_lack_the_auxiliary_networks_is_refused() -> None:
    training = two_blocks(GreedyTraining)
    with pytest.raises(TypeError, match="GreedyTraining is a baseline without checkpoints"):
        training.state_dict()
    with pytest.raises(TypeError, match="GreedyTraining is a baseline without checkpoints"):
        training.load_state_dict({})


def test_another_number_of_auxiliaries_is_refused() -> None:
    blocks = make_blocks(4, 3, 2)
    with pytest.raises(ValueError, match="0 auxiliaries for 2 blocks: expected 1, one for each but the last"):
        GreedyTraining(blocks, [], sgd(blocks), [], mse)
