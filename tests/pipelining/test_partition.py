"""Where a model is cut, and what the blocks are."""

import copy
import itertools
import time
import warnings
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from stretto.pipelining import measure
from stretto.pipelining.events import BlockTimes
from stretto.pipelining.layers import check_not_tied, layers_of
from stretto.pipelining.measure import measure_times
from stretto.pipelining.names import name_prefix
from stretto.pipelining.partition import best_cut, partition, time_costs
from stretto.pipelining.spec import Staleness
from tests.pipelining.processes import Pool


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few passes."""
    monkeypatch.setattr(measure, "_ENOUGH_S", 0)


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # stands for work, many times that of the others
        return x.clone()


def net() -> nn.Sequential:
    inner = nn.Sequential(OrderedDict(wide=nn.Linear(6, 4), norm=nn.BatchNorm1d(4), act=nn.ReLU(inplace=True)))
    return nn.Sequential(nn.Linear(3, 6), nn.Sequential(nn.Dropout(), inner), nn.Linear(4, 2))


def in_a_row(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_blocks_have_the_models_names_share_its_tensors_and_compute_the_same(num_stages: int) -> None:
    model = net().eval()
    blocks = partition(model, num_stages, by="uniform")
    assert len(blocks) == num_stages
    assert [key for block in blocks for key in block.state_dict()] == list(model.state_dict())
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert {name_prefix(block, 3) for block in blocks} == {""}
    x = torch.randn(5, 3)
    assert torch.equal(in_a_row(blocks, x), model(x))
    assert not any(part.training for block in blocks for part in block.modules())


def test_a_cut_may_fall_into_an_inner_container() -> None:
    first, second = partition(net(), 2, by="uniform")
    assert list(first.state_dict()) == ["0.weight", "0.bias", "1.1.wide.weight", "1.1.wide.bias"]
    assert [layer.name for layer in layers_of(net())] == ["0", "1.0", "1.1.wide", "1.1.norm", "1.1.act", "2"]
    assert list(second.state_dict())[-2:] == ["2.weight", "2.bias"]


def test_a_list_has_the_names_of_a_sequential_of_it() -> None:
    blocks = partition([nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()], 2, by="parameters")
    assert [list(block.state_dict()) for block in blocks] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


def test_an_inner_container_with_a_hook_or_of_another_class_stays_whole() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda module, given, output: 2 * output)
    model = nn.Sequential(hooked, Residual(nn.Linear(2, 2), nn.ReLU()))
    assert [layer.name for layer in layers_of(model)] == ["0", "1"]
    x = torch.randn(3, 2)
    assert torch.equal(in_a_row(partition(model, 2, by="uniform"), x), model(x))


def test_the_numbers_of_layers_may_be_given() -> None:
    model = net()
    blocks = partition(model, 3, by=(1, 4, 1))
    assert [len(list(block.state_dict())) for block in blocks] == [2, 7, 2]


def brute_force(costs: list[list[int]]) -> tuple[float, float]:
    num_blocks, num_layers = len(costs), len(costs[0])
    found = []
    for ends in itertools.combinations(range(1, num_layers), num_blocks - 1):
        bounds = zip([0, *ends], [*ends, num_layers], strict=True)
        each = [sum(row[first:end]) for row, (first, end) in zip(costs, bounds, strict=True)]
        found.append((max(each), sum(cost**2 for cost in each)))
    return min(found)


@given(st.data())
def test_the_cut_is_the_best_of_all(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 7))
    num_blocks = data.draw(st.integers(1, num_layers))
    row = st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)
    costs = [data.draw(row) for _ in range(num_blocks)]
    cut = best_cut(costs)
    assert [first for first, _ in cut] == [0, *(end for _, end in cut[:-1])]
    assert cut[-1][1] == num_layers
    each = [sum(row[first:end]) for row, (first, end) in zip(costs, cut, strict=True)]
    assert all(first < end for first, end in cut)
    assert (max(each), sum(cost**2 for cost in each)) == brute_force(costs)


def test_the_last_block_gets_more_as_it_never_recomputes() -> None:
    times = BlockTimes.even(14, 14, 28)
    default, kept = Staleness.of(2), Staleness.delayed_gradients(2)
    assert best_cut(time_costs(times, default)) == [(0, 6), (6, 14)]
    assert best_cut(time_costs(times, kept)) == best_cut(time_costs(times, Staleness.backprop(2)))
    assert best_cut(time_costs(times, kept)) == [(0, 7), (7, 14)]


def test_layers_without_parameters_stay_with_what_comes_before() -> None:
    model = [nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 4), nn.ReLU()]
    assert [len(block) for block in partition(model, 2, by="parameters")] == [3, 2]
    assert [len(list(block.parameters())) for block in partition(model, 5, by="parameters")] == [2, 0, 0, 2, 0]


def test_by_time_measures_on_copies_and_leaves_everything_as_it_was(quick: None) -> None:
    model = net()
    model.append(Slow())
    model[1].eval()
    model[0].weight.grad = torch.ones(6, 3)
    sample = torch.randn(8, 3)
    before, modes = copy.deepcopy(model.state_dict()), [part.training for part in model.modules()]
    state, given = torch.get_rng_state(), sample.clone()
    blocks = partition(model, 2, sample=sample)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(sample, given)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
    assert torch.equal(model[0].weight.grad, torch.ones(6, 3))
    assert [parameter.grad for parameter in model[2].parameters()] == [None, None]
    assert list(blocks[1].state_dict()) == []
    assert list(blocks[0].state_dict()) == list(before)


def cut_differently(rank: int, world: int) -> tuple[list[int], list[int], list[str]]:
    """The lengths that process `rank` finds, with its own sample and without one, and what is raised."""
    slow_at = 0 if rank == 0 else 4  # by its own times each process would cut elsewhere
    model = nn.Sequential(*[Slow() if at == slow_at else nn.Linear(3, 3) for at in range(5)])
    sample = torch.randn(4, 3)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_ENOUGH_S", 0)
        own, firsts = ([len(b) for b in partition(model, 2, sample=x)] for x in (sample, None if rank else sample))
        for wrong in (torch.randn(4, 2 + rank), sample if rank else None):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                partition(model, 2, sample=wrong)
            told.append(str(raised.value)[:20])
    return own, firsts, told


def test_all_processes_cut_as_the_first_one_measured_and_fail_as_it_does(pool: Pool) -> None:
    for found in pool.run(cut_differently, 2):
        assert found == ([1, 4], [1, 4], ["layer '1' (Linear) f", 'by="time" measures t'])


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> dict:
        return {"x": x, "ids": torch.arange(len(x)), "nothing": None}


class Take(nn.Module):
    def forward(self, both: dict) -> torch.Tensor:
        return both["x"][both["ids"]]


def test_blocks_that_pass_dicts_integers_and_none_are_measured(quick: None) -> None:
    times = measure_times([nn.Linear(3, 3), Pair(), Take(), nn.Linear(3, 1)], torch.randn(4, 3))
    assert times.K == 4
    assert min(times.forward_s) > 0
    embedded = measure_times([nn.Embedding(5, 3), nn.Linear(3, 1)], torch.tensor([[1, 2]]))
    assert min(embedded.backward_s) > 0


@pytest.fixture(scope="module")
def pipe() -> Pipe:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return pipeline(net(), (torch.randn(4, 3),), split_spec={"2": SplitPoint.BEGINNING})


def test_what_pipeline_split_is_taken_as_it_is(pipe: Pipe) -> None:
    blocks = partition(pipe, 2)
    assert [key for block in blocks for key in block.state_dict()] == list(net().state_dict())
    assert {name_prefix(block, 1) for block in blocks} == {""}
    with pytest.raises(ValueError, match=r"num_stages=3, but pipeline\(\) split the model into 2"):
        partition(pipe, 3)


def test_tied_weights_across_blocks_are_refused_with_both_names() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(5, 3), mix=nn.Linear(3, 3), head=nn.Linear(3, 5)))
    model.head.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"parameter 'head.weight' of block 1 is 'embed.weight' of block 0"):
        partition(model, 2, by="uniform")
    assert len(partition(model, 1, by="uniform")) == 1
    model.head.weight = nn.Parameter(model.embed.weight.data)
    with pytest.raises(ValueError, match="of block 1 is 'embed"):
        partition(model, 2, by="uniform")


def test_tied_weights_of_blocks_made_by_hand_have_the_blocks_number() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'1\.0\.weight' of block 1 is '0\.weight' of block 0"):
        check_not_tied([layer, nn.Sequential(layer)])
    norm = nn.BatchNorm1d(2, affine=False)
    with pytest.raises(ValueError, match=r"buffer '1\.running_mean' of block 1"):
        check_not_tied([norm, norm])


def test_a_module_without_tensors_may_be_in_two_blocks() -> None:
    act = nn.ReLU()
    blocks = partition([nn.Linear(2, 2), act, nn.Linear(2, 2), act], 2, by="uniform")
    assert blocks[0][1] is act
    assert blocks[1][1] is act


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)


def hooked() -> nn.Sequential:
    model = net()
    model.register_forward_pre_hook(lambda module, given: None)
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "error", "says"),
    [
        (net, {"num_stages": 7, "by": "uniform"}, ValueError, "7 blocks of a model with 6 layers"),
        (net, {"num_stages": 0, "by": "uniform"}, ValueError, "0 blocks"),
        (net, {"num_stages": 2}, ValueError, 'give sample=, or by="parameters"'),
        (net, {"num_stages": 2, "by": (2, 3)}, ValueError, r"by=\(2, 3\): .*2 blocks, 6 in all"),
        (net, {"num_stages": 2, "by": (6, 0)}, ValueError, r"by=\(6, 0\)"),
        (net, {"num_stages": 2, "by": (2, 2, 2)}, ValueError, r"by=\(2, 2, 2\)"),
        (net, {"num_stages": 2, "sample": torch.randn(4, 3), "staleness": Staleness.of(3)}, ValueError, "3 blocks"),
        (net, {"num_stages": 2, "by": "size"}, ValueError, "by='size'"),
        (Branches, {"num_stages": 1}, TypeError, r"Branches, .*pipeline\("),
        (lambda: 3, {"num_stages": 1}, TypeError, "the model is 3"),
        (lambda: [nn.ReLU(), torch.relu], {"num_stages": 1}, TypeError, "a list of builtin_function"),
        (list, {"num_stages": 1}, TypeError, "a list of nothing"),
        (hooked, {"num_stages": 2, "by": "uniform"}, ValueError, "hooks"),
        (net, {"num_stages": 2, "sample": torch.randn(4, 5)}, RuntimeError, r"layer '0' \(Linear\) .*\[4, 5\]"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: object, arguments: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        partition(model(), **arguments)
