"""An EchoLoader around a loader that Accelerate prepared."""

import io

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import stretto


def prepared() -> stretto.EchoLoader:
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=10, shuffle=True)
    return stretto.echo(Accelerator(cpu=True).prepare(loader), factor=2)


def rest_of(updates) -> list[list[int]]:
    return [batch[0].tolist() for batch in updates]


def test_echo_of_a_prepared_loader_keeps_factor_and_length() -> None:
    with prepared() as echoed:
        assert len(echoed) == 20
        assert [len(rest_of(echoed)) for _ in range(3)] == [20, 20, 20]
        assert echoed.stats().uses == 600


def test_prepared_loader_resumes_exactly_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    with prepared() as echoed:
        updates = iter(echoed)
        for _ in range(7):
            next(updates)
        file = io.BytesIO()
        torch.save(echoed.state_dict(), file)
        expected = rest_of(updates)
    file.seek(0)
    with prepared() as again:
        again.load_state_dict(torch.load(file, weights_only=True))
        assert rest_of(again) == expected
    assert torch.equal(torch.get_rng_state(), before)
