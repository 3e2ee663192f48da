"""What the blocks of a split model hold in memory."""

import copy

import pytest
import torch
from torch import nn

from stretto.pipelining.memory import (
    BlockMemory,
    BlockSizes,
    measure_sizes,
    predict_memory,
    predict_microbatch_memory,
)
from stretto.pipelining.spec import Staleness

BATCH = 5
SIZES = [BlockSizes(100, 90, 180, 8, 16, 64), BlockSizes(200, 190, 380, 16, 4, 32), BlockSizes(10, 0, 0, 4, 4, 12)]


def blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Sequential(nn.Linear(2, 6), nn.Tanh())]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_the_parts_of_a_block_are_counted() -> None:
    sample = torch.randn(BATCH, 3)
    first, second = measure_sizes(blocks(), sample, sgd)
    weights = 4 * (3 * 4 + 4 + 4 * 2 + 2)
    relu_output = 4 * 4 * BATCH
    assert first == BlockSizes(weights, weights, weights, 4 * 3 * BATCH, 4 * 2 * BATCH, relu_output)
    assert second.input_bytes == first.output_bytes
    assert second.graph_bytes == second.output_bytes == 4 * 6 * BATCH


def test_what_is_not_trained_has_no_gradient_and_no_optimizer_state() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].requires_grad_(False)
    (found,) = measure_sizes([model], torch.randn(BATCH, 3), torch.optim.AdamW)
    assert found.gradients_bytes == 4 * 8
    assert found.optimizer_bytes == 2 * 4 * 8 + 2 * 4  # two moments, and the number of steps of each parameter
    assert found.weights_bytes == 4 * (16 + 8 + 8) + 8
    (none,) = measure_sizes([nn.ReLU()], torch.randn(BATCH, 3), sgd)
    assert (none.weights_bytes, none.optimizer_bytes, none.graph_bytes) == (0, 0, 0)


def test_a_block_that_writes_to_its_input_needs_memory_of_its_own_for_it() -> None:
    kept, written = ([nn.Linear(3, 3), act] for act in (nn.ReLU(), nn.ReLU(inplace=True)))
    sample = torch.randn(BATCH, 3)
    assert [size.graph_bytes for size in measure_sizes(kept, sample)] == [0, 4 * 3 * BATCH]
    assert [size.graph_bytes for size in measure_sizes(written, sample)] == [0, 4 * 3 * BATCH]
    assert measure_sizes([nn.Sequential(*written)], sample)[0].graph_bytes == 4 * 3 * BATCH


def test_memory_used_twice_in_a_graph_is_counted_once() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            return y * y.view(-1).view_as(y)

    (found,) = measure_sizes([Square()], torch.randn(BATCH, 3, requires_grad=True))
    assert found.graph_bytes == 4 * 3 * BATCH


def test_counting_leaves_the_blocks_and_the_random_numbers_as_they_were() -> None:
    parts = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()).eval()]
    before, state = copy.deepcopy(parts[0].state_dict()), torch.get_rng_state()
    measure_sizes(parts, torch.randn(BATCH, 3, generator=torch.Generator()), sgd)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(parts[0].state_dict()[key], before[key]) for key in before)
    assert [parameter.grad for parameter in parts[0].parameters()] == [None] * 4
    assert not parts[0].training


def test_a_block_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"block 1 \(Linear\) fails on what .*\[5, 2\] torch.float32"):
        measure_sizes([nn.Linear(3, 2), nn.Linear(3, 2)], torch.randn(BATCH, 3))


def test_staleness_stores_inputs_and_outputs_but_one_graph() -> None:
    assert predict_memory(Staleness.dsp(3), SIZES) == [
        BlockMemory(100, 90, 180, 5 * 8, 1 * 16, 64, 0),
        BlockMemory(200, 190, 380, 3 * 16, 1 * 4, 32, 0),
        BlockMemory(10, 0, 0, 1 * 4, 0, 12, 0),
    ]
    assert predict_memory(Staleness.dsp(3), SIZES)[2].total_bytes == 26


def test_stashed_weights_keep_a_graph_and_a_copy_for_each_batch_under_way() -> None:
    assert predict_memory(Staleness.delayed_gradients(3), SIZES) == [
        BlockMemory(100, 90, 180, 3 * 8, 0, 3 * 64, 3 * 100),
        BlockMemory(200, 190, 380, 2 * 16, 0, 2 * 32, 2 * 200),
        BlockMemory(10, 0, 0, 4, 0, 12, 0),
    ]


def test_micro_batches_keep_the_graphs_under_way_or_their_inputs() -> None:
    held = [(memory.inputs_bytes, memory.graphs_bytes) for memory in predict_microbatch_memory("gpipe", SIZES, 4)]
    assert held == [(8, 64), (16, 32), (4, 12)]
    checkpointed = predict_microbatch_memory("gpipe", SIZES, 4, checkpoint=True)
    assert [(memory.inputs_bytes, memory.graphs_bytes) for memory in checkpointed] == [(8, 16), (16, 8), (4, 3)]
    early = predict_microbatch_memory("1f1b", SIZES, 4)
    assert [(memory.inputs_bytes, memory.graphs_bytes) for memory in early] == [(6, 48), (8, 16), (1, 3)]


def test_another_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 blocks for DSP\(0,0; 1,0\), which has 2"):
        predict_memory(Staleness.of(2), SIZES)
