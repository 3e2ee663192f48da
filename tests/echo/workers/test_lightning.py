"""EchoDataLoader in Lightning's Trainer, in one process and with DDP in two."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stretto.echo.workers.memory import EchoedDataset
from tests.echo.workers.scripts.common import Rows, echo_loader, make_stream
from tests.echo.workers.torchrun import results_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(isinstance|LeafSpec|treespec).*"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*log_every_n_steps.*"),
]
BOTH = pytest.mark.parametrize("name", ["passed", "hook"])


def indices_of(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index, _ in batch]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("lightning_ranks", tmp_path_factory.mktemp("ranks"))


@BOTH
def test_ddp_keeps_class_and_factor_wraps_once_and_shards(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in (rank[name] for rank in ranks):
        assert seen["class"] == "EchoDataLoader"
        assert seen["dataset"] == ["EchoedDataset", "Rows"]
        assert seen["samplers"] == ["DistributedSampler", "DistributedSampler"]
        assert seen["factor"] == {"passed": 3, "hook": 2.5}[name]
        assert seen["batch_size"] == 8


@BOTH
def test_ddp_gives_an_example_to_one_rank_its_number_of_times(ranks: list[dict[str, Any]], name: str) -> None:
    for epoch in range(2):
        counts = [Counter(indices_of(rank[name]["epochs"][epoch])) for rank in ranks]
        assert len(counts[0].keys() & counts[1].keys()) <= 1  # the sampler has one of 61 rows on both
        assert counts[0].keys() | counts[1].keys() == set(range(61))
        assert all(set(count.values()) <= {"passed": {3}, "hook": {2, 3}}[name] for count in counts)


@BOTH
def test_ddp_makes_as_many_updates_as_the_loader_is_long(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in (rank[name] for rank in ranks):
        assert [len(batches) for batches in seen["epochs"]] == [seen["len"]] * len(seen["epochs"])
        assert (seen["reads"], seen["reread"]) == (31 * len(seen["epochs"]), 0)
    assert ranks[0][name]["len"] == ranks[1][name]["len"]


@BOTH
def test_ddp_s_epochs_differ_in_shards_and_all_uses_in_augmentation(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (set(indices_of(batches)) for batches in ranks[0][name]["epochs"][:2])
    assert first != second
    noises = [noise for rank in ranks for epoch in rank[name]["epochs"] for batch in epoch for _, noise in batch]
    assert len(set(noises)) == len(noises)


@pytest.mark.parametrize("name", ["resumed", "stream"])
def test_ddp_resumes_all_ranks_exactly_from_a_checkpoint_within_an_epoch(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rest, resumed in (rank[name] for rank in ranks):
        assert rest
        assert resumed == rest
    assert ranks[0][name] != ranks[1][name]


def test_ddp_refuses_a_given_batch_sampler(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["given batch_sampler"].startswith("TypeError")
        assert (
            "Lightning can't inject a (distributed) sampler into your batch sampler" in rank["given batch_sampler"]
        )


@pytest.fixture(scope="module")
def models() -> Any:
    """Imported where it is used: Lightning takes three seconds, and every test process collects this file."""
    return importlib.import_module("tests.echo.workers.scripts.lightning_ranks")


def test_one_process_uses_the_loader_as_it_is(models: Any) -> None:
    loader = echo_loader(61, 2)
    model = models.fit(models.Model(), loader)
    assert model.loader is loader
    assert type(loader.dataset) is EchoedDataset
    assert type(loader.dataset.dataset) is Rows
    for batches in model.epochs.values():
        assert Counter(indices_of(batches)) == dict.fromkeys(range(61), 3)
        assert len(batches) == len(loader)
    assert indices_of(model.epochs[0]) != indices_of(model.epochs[1])
    assert (loader.stats().reads, loader.stats().updates) == (122, 2 * len(loader))


def test_one_process_with_a_loader_made_in_the_hook(models: Any) -> None:
    seen = models.fit(models.WithHook()).seen()
    assert (seen["class"], seen["dataset"]) == ("EchoDataLoader", ["EchoedDataset", "Rows"])
    assert (seen["factor"], seen["batch_size"], seen["reads"]) == (2.5, 8, 122)
    assert [len(batches) for batches in seen["epochs"]] == [seen["len"]] * 2


@pytest.mark.parametrize("save_after", [1, 22, 24, 30, 46])
def test_one_process_resumes_exactly_from_a_checkpoint(models: Any, tmp_path: Path, save_after: int) -> None:
    model = models.fit(models.Model(tmp_path / "a.ckpt", save_after), echo_loader(61))
    batches = [batch for epoch in model.epochs.values() for batch in epoch]
    assert len(batches) == 46
    again = models.fit(models.Model(), echo_loader(61), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    rest = [batch for epoch in again.epochs.values() for batch in epoch]
    assert rest == batches[save_after:]


@pytest.mark.parametrize("make", [echo_loader, lambda: echo_loader(num_workers=2), make_stream])
def test_one_process_resumes_exactly_from_the_end_of_an_epoch(models: Any, tmp_path: Path, make: Any) -> None:
    """Lightning does not load the loader's state then."""
    model = models.fit(models.SavesEpochs(tmp_path / "a.ckpt"), make())
    again = models.fit(models.Model(), make(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert list(again.epochs.items()) == [(1, model.epochs[1])]


def test_one_process_validates_after_each_epoch(models: Any) -> None:
    """A plain and an echoed loader side by side in one Trainer."""
    model = models.fit(models.Validated(), echo_loader(61), DataLoader(Rows(16), 8))
    assert model.num_validated == 2 * 2 + 2  # and the sanity check's
    assert [len(batches) for batches in model.epochs.values()] == [23, 23]
