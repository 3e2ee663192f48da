"""`stretto.profile` on real loaders: counts, stalls, and nothing left behind."""

import json
import multiprocessing
import multiprocessing.util
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import stretto
from stretto.profile.profiler import Stalls

READ_S = 0.004


class Waiting(Dataset[torch.Tensor]):
    """Models a slow disk: each read waits."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(READ_S)
        return torch.full((8,), float(index))


class Training:
    """A step that counts its batches."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.num_batches = 0

    def __call__(self, batch: torch.Tensor) -> None:
        self.num_batches += 1
        self.optimizer.zero_grad()
        self.model(batch / 64).square().mean().backward()
        self.optimizer.step()


def count(batch: object) -> None:
    """A step without an optimizer of torch's."""


def test_a_data_set_that_waits_is_named_as_waiting_and_not_as_computing() -> None:
    step = Training()
    found = stretto.profile(DataLoader(Waiting(), batch_size=8, num_workers=2), step, updates=20, warmup=2)
    rank = found.record["ranks"][0]
    assert rank["updates"] == rank["batches"] == rank["optimizer_steps"] == 20
    assert step.num_batches == 20 + 2 + 20
    assert "waiting for reads" in found.verdict
    assert found.stalls.fetch_stall_s > found.stalls.preparation_stall_s
    assert found.ratio > 1.1
    assert found.au_percent < 50
    assert [stage["name"] for stage in rank["loaders"][0]["stages"]] == ["read", "collate"]
    assert rank["loaders"][0]["stages"][0]["wall_ms"] >= 1e3 * READ_S
    assert {record["action"] for record in found.advice} >= {"workers", "echo"}
    assert found.verdict in str(found)


def test_a_loop_without_workers_is_told_to_overlap_first() -> None:
    found = stretto.profile(DataLoader(Waiting(), batch_size=4), Training(), updates=12, warmup=1)
    assert found.verdict.startswith("Not overlapped")
    assert found.advice[0]["action"] == "overlap"


def test_an_instant_loader_is_told_that_echoing_will_not_help() -> None:
    found = stretto.profile([torch.randn(20_000, 8) for _ in range(10)], Training(), updates=20, warmup=2)
    assert [record["action"] for record in found.advice] == ["none"]
    assert "will not help" in found.advice[0]["title"]
    assert found.stalls.first_read_s is None


def test_the_loop_goes_on_over_passes_until_it_has_its_updates() -> None:
    step = Training()
    found = stretto.profile([torch.randn(4, 8)] * 3, step, updates=8, warmup=2)
    assert found.record["ranks"][0]["updates"] == 8
    assert step.num_batches == 8 + 2 + 8


def test_a_step_without_an_optimizer_of_torchs_counts_as_an_update() -> None:
    found = stretto.profile([torch.zeros(4)] * 4, count, updates=6, warmup=1)
    assert found.record["ranks"][0]["updates"] == 6


def test_the_process_is_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    multiprocessing.util.get_temp_dir()  # keeps its sockets, whose paths may not be long, where they are
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = (DataLoader.__iter__, DataLoader._get_iterator, stretto.EchoLoader.__iter__)
    loader = DataLoader(Waiting(), batch_size=8, num_workers=1)
    stretto.profile(loader, Training(), updates=4, warmup=1)
    assert (DataLoader.__iter__, DataLoader._get_iterator, stretto.EchoLoader.__iter__) == before
    assert "__init_subclass__" not in vars(DataLoader)
    assert loader.worker_init_fn is None
    assert list(tmp_path.glob("stretto*")) == []
    assert multiprocessing.active_children() == []


def test_an_echo_that_is_in_place_is_measured_as_one() -> None:
    with stretto.echo(DataLoader(Waiting(), batch_size=8, num_workers=1), 2.0) as loader:
        found = stretto.profile(loader, Training(), updates=30, warmup=2)
    echo = found.record["ranks"][0]["loaders"][0]["echo"]
    assert echo is not None
    assert (echo["unit"], echo["factor"]) == ("example", 2.0)
    assert echo["fresh_items"] > 0
    assert all(record["action"] != "echo" for record in found.advice)


def test_the_files_are_those_of_a_run(tmp_path: Path) -> None:
    found = stretto.profile(DataLoader(Waiting(), batch_size=16), Training(), updates=4, warmup=1)
    found.save_json(tmp_path / "p.json")
    found.save_html(tmp_path / "p.html")
    found.save_trace(tmp_path / "p.trace")
    assert json.loads((tmp_path / "p.json").read_text())["verdict"] == found.verdict
    assert "plotly" in (tmp_path / "p.html").read_text()
    events = json.loads((tmp_path / "p.trace").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"wait", "update", "make a batch"}


def test_a_loader_of_one_batch_is_measured() -> None:
    loader = DataLoader(Waiting(), batch_size=512, sampler=range(10))
    found = stretto.profile(loader, Training(), updates=3, warmup=1)
    assert found.record["ranks"][0]["updates"] == 3
    assert found.stalls.data_stall_s > 10 * READ_S


class Holes(Waiting):
    """Some of its examples cannot be read; the sampler leaves them out."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 10 == 0:
            raise ValueError("missing")
        return super().__getitem__(index)


def test_only_examples_that_the_loader_reads_are_read() -> None:
    loader = DataLoader(Holes(), batch_size=4, sampler=[index for index in range(60) if index % 10])
    found = stretto.profile(loader, Training(), updates=4, warmup=1)
    assert found.stalls.first_read_s is not None
    assert found.stalls.first_read_s >= READ_S


def test_measuring_draws_no_numbers_of_the_users() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    loader = DataLoader(Waiting(), batch_size=4, shuffle=True, generator=torch.Generator())
    stretto.profile(loader, count, updates=2, warmup=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_that_cannot_be_copied_are_given_as_they_are() -> None:
    loader = DataLoader(Waiting(), batch_size=4, collate_fn=iter)
    assert stretto.profile(loader, count, updates=2, warmup=1).record["ranks"][0]["updates"] == 2


def test_what_is_slowed_is_what_no_stall_explains() -> None:
    stalls = Stalls(
        live_s=10,
        data_stall_s=4,
        headspace_s=3,
        upstream_s=8,
        first_read_s=None,
        second_read_s=None,
        fetch_stall_s=3,
        preparation_stall_s=1,
        transfer_stall_s=1,
    )
    assert stalls.slowed_s == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((iter([1]), count), TypeError, "loader is a list_iterator: expected a re-iterable"),
        ((5, count), TypeError, "loader is a int: expected a re-iterable"),
        (([1], 3), TypeError, "step=3 is a int: expected a function of a batch"),
        (([], count), ValueError, "the loader is empty"),
        ((DataLoader(TensorDataset(torch.zeros(0))), count), ValueError, "the loader is empty"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stretto.profile(*arguments)


@pytest.mark.parametrize(("name", "value"), [("updates", 1), ("warmup", 0)])
def test_too_few_batches_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: expected an integer"):
        stretto.profile([1], count, **{name: value})
