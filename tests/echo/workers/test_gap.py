"""The memorising guard inside an EchoDataLoader: uses as planned, also where a trainer fetches one batch ahead."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import stretto
from stretto import EchoDataLoader, echo_plan
from tests.echo.sources import through_file
from tests.echo.workers.scripts.common import Rows, echo_loader, make_stream

FIRST_LOSS, LATER_LOSS = 1.0, 0.75
GAP = pytest.approx(0.25, rel=1e-9)


def with_lightnings_warnings(test: Any) -> Any:
    """A test in which Lightning warns of this and that."""
    for text in ("isinstance|LeafSpec|treespec", "does not have many workers", "log_every_n_steps", "__len__"):
        test = pytest.mark.filterwarnings(f"ignore:.*({text})")(test)
    return test


class Follower:
    """Knows each example of an epoch by its index, and so which of a batch an earlier one had."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def losses(self, batch: torch.Tensor) -> list[float]:
        indices = batch.reshape(-1, 2)[:, 0].tolist()
        losses = [LATER_LOSS if index in self.seen else FIRST_LOSS for index in indices]
        self.seen.update(indices)
        return losses


@settings(max_examples=25)
@given(
    n=st.integers(8, 120),
    factor=st.sampled_from([1, 1.5, 2, 3, 5.5]),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    buffer=st.integers(9, 40),
)
def test_first_and_later_uses_are_those_of_examples_followed_by_identity(
    n: int, factor: Any, batch_size: int, drop_last: bool, buffer: int
) -> None:
    loader = echo_loader(n, factor=factor, batch_size=batch_size, drop_last=drop_last, buffer=buffer)
    for _ in range(2):
        follower = Follower()
        for batch in loader:
            loader.observe(follower.losses(batch))
    gap = loader.stats().echo_gap
    assert gap is None or gap == GAP


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_updates", [1, 9])
def test_workers_and_a_resume_change_nothing(num_workers: int, num_updates: int) -> None:
    follower = Follower()
    loader = echo_loader(num_workers=num_workers, factor=2.5)
    for _, batch in zip(range(num_updates), loader, strict=False):
        loader.observe(follower.losses(batch))
    state = through_file(loader.state_dict())
    again = echo_loader(num_workers=num_workers, factor=2.5)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="no batch was handed out yet"):
        again.observe([1.0] * 8)
    for batch in again:
        again.observe(follower.losses(batch))
    assert again.stats().echo_gap == GAP


def test_observing_changes_no_batch_and_no_state() -> None:
    ran = []
    for observes in (False, True):
        loader, batches = echo_loader(), []
        for batch in loader:
            batches.append(batch.tolist())
            if observes:
                loader.observe(torch.rand(len(batch)))
            state = loader.state_dict()
        ran.append((batches, state))
    assert ran[0] == ran[1]


class Batches:
    """A batch sampler of consecutive pairs."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[at, at + 1] for at in range(0, 60, 2)])

    def __len__(self) -> int:
        return 30


def test_given_batches_and_single_examples_are_of_one_kind() -> None:
    for loader in (
        EchoDataLoader(Rows(60), batch_sampler=Batches(), factor=3),
        EchoDataLoader(Rows(60), batch_size=None, factor=3),
    ):
        follower = Follower()
        for batch in loader:
            loader.observe(torch.tensor(follower.losses(batch)))
        assert loader.stats().echo_gap == GAP


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_loader_that_accelerate_rebuilt_uses_are_those_of_the_batch_in_the_step(num_workers: int) -> None:
    loader = Accelerator(cpu=True).prepare(echo_loader(num_workers=num_workers))
    plan = echo_plan(loader)
    for _ in range(2):
        follower = Follower()
        for batch in loader:
            plan.observe(follower.losses(batch))
            with pytest.raises(ValueError, match="observed already"):
                plan.observe([1.0] * len(batch))
    assert plan.stats().echo_gap == GAP


def test_where_accelerate_cuts_batches_up_losses_are_refused() -> None:
    config = DataLoaderConfiguration(dispatch_batches=True)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(echo_loader())
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="dispatch_batches=False"):
        echo_plan(loader).observe([1.0] * len(batch))


class Model(lightning.LightningModule):
    """Observes what is in its step."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.loader = loader
        self.follower = Follower()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.loader.observe(self.follower.losses(batch))
        return (batch.float() @ self.weight).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(loader: Any) -> None:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, **quiet)
    trainer.fit(Model(loader), loader)


@with_lightnings_warnings
@pytest.mark.parametrize("around", [False, True])
def test_in_lightning_uses_are_those_of_the_batch_in_the_step(around: bool) -> None:
    plain = DataLoader(Rows(100), 8)
    with stretto.echo(plain, 3, carry_over=False) if around else nullcontext(echo_loader()) as loader:
        fit(loader)
        assert loader.stats().echo_gap == GAP


@with_lightnings_warnings
@pytest.mark.parametrize("around", [False, True])
def test_where_lightning_fetches_ahead_losses_are_refused(around: bool) -> None:
    plain = DataLoader(Rows(100), 8)
    with (
        stretto.echo(plain, "auto") if around else nullcontext(echo_loader(factor="auto")) as loader,
        pytest.raises(ValueError, match="Lightning fetches a batch ahead"),
    ):
        fit(loader)


def test_iterable_data_sets_are_refused() -> None:
    loader = make_stream()
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="Expected a map-style data set"):
        loader.observe([1.0] * len(batch))
    assert loader.stats().echo_gap is None


class Broken(Rows):
    """Every tenth row raises."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 10 == 3:
            raise OSError(index)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_batches_short_of_skipped_examples_do_not_count() -> None:
    loader = EchoDataLoader(Broken(200), 4, shuffle=True, factor=3, seed=3, on_error="skip")
    follower, num_short = Follower(), 0
    for batch in loader:
        losses = follower.losses(batch)
        num_short += len(losses) < 4
        loader.observe([1e6] * len(batch) if len(losses) < 4 else losses)
    assert num_short > 10
    assert loader.stats().echo_gap == GAP


@pytest.mark.filterwarnings("ignore:.*skipped")
@pytest.mark.parametrize("batching", [{"batch_size": 1}, {"batch_size": None}, {"batch_sampler": Batches()}])
def test_batches_in_which_another_example_may_stand_in_do_not_count(batching: Any) -> None:
    loader = EchoDataLoader(Broken(60), factor=3, on_error="skip", **batching)
    follower, num_skipped = Follower(), 0
    for batch in loader:
        num_skipped = loader.stats().skipped
        loader.observe([1e6] * len(batch.reshape(-1, 2)) if num_skipped else follower.losses(batch))
    assert num_skipped > 0
    assert loader.stats().echo_gap in (None, GAP)


@pytest.mark.parametrize("by_plan", [False, True])
def test_the_warning_points_at_the_call(by_plan: bool) -> None:
    loader = echo_loader(300, factor=6)
    follower = Follower()
    observer = echo_plan(loader) if by_plan else loader
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            observer.observe([1.0 if loss == FIRST_LOSS else 0.1 for loss in follower.losses(batch)])
    assert [warning.filename for warning in caught] == [__file__]
    assert "90% below" in str(caught[0].message)


def test_a_wrong_number_of_losses_is_told_with_both() -> None:
    loader = echo_loader()
    iterator = iter(loader)
    with pytest.raises(ValueError, match="no batch was handed out yet"):
        loader.observe([1.0] * 8)
    next(iterator)
    with pytest.raises(ValueError, match=r"found losses of shape \(7,\), expected \(8,\)"):
        loader.observe([1.0] * 7)
