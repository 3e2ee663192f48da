"""The weights of split models under the plain model's names, there and back."""

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.pipelining import Simulation, simulate
from stretto.pipelining.partition import partition


class Scaled(nn.Linear):
    """With something in its state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"calls": 3}


def plain_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    return nn.Sequential(
        OrderedDict(features=features, flat=nn.Flatten(), hidden=Scaled(12, 8), act=nn.ReLU(), head=nn.Linear(8, 2))
    )


def split(model: nn.Module, num_blocks: int = 3) -> Simulation:
    return over(partition(model, num_blocks, by="uniform"))


def over(blocks: list[nn.Module]) -> Simulation:
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1) if (parameters := list(block.parameters())) else None
        for block in blocks
    ]
    return simulate(blocks, optimizers, functional.cross_entropy)


def train(simulation: Simulation) -> None:
    for n in range(4):
        simulation.step(torch.ones(2, 1, 4, 4) * n, target=torch.tensor([0, 1]))
    simulation.flush()


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_a_partitioned_model_has_the_plain_models_names_there_and_back(num_blocks: int) -> None:
    simulation = split(plain_model(0), num_blocks)
    train(simulation)
    merged = simulation.merged_weights()
    target = plain_model(1)
    assert list(merged) == list(target.state_dict())
    target.load_state_dict(merged, strict=True)
    back = split(plain_model(2))
    back.load_weights(target.state_dict())
    for name, value in back.merged_weights().items():
        assert value == merged[name] if name.endswith("_extra_state") else torch.equal(value, merged[name])


def test_blocks_made_by_hand_have_the_names_of_a_sequential_of_them() -> None:
    blocks = [nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), nn.ReLU(), nn.Linear(4, 2)]
    simulation = over(blocks)
    train(simulation)
    merged = simulation.merged_weights()
    assert list(merged) == ["0.1.weight", "0.1.bias", "2.weight", "2.bias"]
    nn.Sequential(*blocks).load_state_dict(merged, strict=True)
    simulation.load_weights({name: torch.full_like(value, 3) for name, value in merged.items()})
    assert all((value == 3).all() for value in simulation.merged_weights().values())
    assert not (merged["2.weight"] == 3).any(), "merged weights are a copy"


def test_a_checkpoint_holds_state_that_is_no_tensor(tmp_path: object) -> None:
    simulation = split(plain_model(0))
    train(simulation)
    simulation.save(f"{tmp_path}/saved")
    again = split(plain_model(1))
    again.load(f"{tmp_path}/saved")
    merged = again.merged_weights()
    assert merged.pop("hidden._extra_state") == {"calls": 3}
    assert all(
        torch.equal(value, merged[name]) for name, value in simulation.merged_weights().items() if name in merged
    )


def test_merged_weights_load_without_code() -> None:
    file = io.BytesIO()
    torch.save(split(plain_model(0)).merged_weights(), file)
    file.seek(0)
    assert "head.bias" in torch.load(file, weights_only=True)


def test_a_name_in_two_blocks_is_refused_with_both() -> None:
    first, *_ = partition(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 2, by="uniform")
    also, *_ = partition(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 2, by="uniform")
    with pytest.raises(ValueError, match=r"'0.weight' is a name in block 0 and in block 1"):
        over([first, also])


def test_missing_unexpected_and_misshapen_weights_are_refused_with_their_names() -> None:
    simulation = split(plain_model(0))
    weights = simulation.merged_weights()
    before = simulation.merged_weights()
    with pytest.raises(ValueError, match=r"missing \['head.bias'\], unexpected \['heads.bias'\]"):
        simulation.load_weights({name.replace("head.b", "heads.b"): value for name, value in weights.items()})
    with pytest.raises(
        ValueError, match=r"head.bias of block 2 has the shape torch.Size\(\[2\]\), the given one .*3"
    ):
        simulation.load_weights(weights | {"features.0.bias": torch.ones(3), "head.bias": torch.ones(3)})
    assert torch.equal(simulation.merged_weights()["features.0.bias"], before["features.0.bias"])


def test_weights_are_not_replaced_under_batches_on_their_way() -> None:
    simulation = split(plain_model(0))
    weights = simulation.merged_weights()
    simulation.step(torch.ones(2, 1, 4, 4), target=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"under way after batch 1: call flush\(\) before"):
        simulation.load_weights(weights)
    simulation.flush()
    simulation.load_weights(weights)


def test_stale_copies_of_weights_do_not_outlive_a_load() -> None:
    def trained(first_weights: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Linear(3, 3), nn.Linear(3, 2)]
        optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in blocks]
        simulation = simulate(blocks, optimizers, functional.cross_entropy, backward_params="stashed", accumulate=2)
        batch = torch.ones(2, 3), torch.tensor([0, 1])
        weights = simulation.merged_weights()
        if first_weights:
            # the copies made here date from update 0
            state = simulation.state_dict()
            simulation.step(*batch)
            simulation.load_state_dict(state)
        simulation.load_weights({name: value * 2 for name, value in weights.items()})
        for _ in range(4):
            simulation.step(*batch)
        simulation.flush()
        return simulation.merged_weights()

    expected = trained(False)
    assert all(torch.equal(value, expected[name]) for name, value in trained(True).items())
