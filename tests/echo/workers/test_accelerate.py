"""EchoDataLoader prepared by Accelerate, in one process and in two."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader

from stretto import EchoDataLoader, EchoPlan, echo_plan
from stretto.echo.workers.memory import EchoedDataset
from tests.echo.sources import through_file
from tests.echo.workers.scripts.common import Rows, Stream, add_noise, echo_loader
from tests.echo.workers.torchrun import results_of

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
SHARED = ["64 0", "64 2", "61 0", "61 2", "2.5", "drop_last"]


def prepared(*args: Any, **arguments: Any) -> Any:
    return Accelerator(cpu=True).prepare(echo_loader(*args, **arguments))


def batches_of(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def indices_of(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index, _ in batch]


@WORKERS
def test_prepared_loader_is_recognised_and_keeps_factor_and_length(num_workers: int) -> None:
    loader = prepared(101, num_workers)
    assert isinstance(loader, DataLoader)
    batches = batches_of(loader)
    assert len(loader) == len(batches) == (39 if num_workers else 38)  # one short batch a worker
    assert Counter(indices_of(batches)) == dict.fromkeys(range(101), 3)
    stats = echo_plan(loader).stats()
    assert (stats.reads, stats.reread, stats.uses, stats.epochs) == (101, 0, 303, 1)


def test_data_set_is_wrapped_once_also_when_prepared_or_built_again() -> None:
    accelerator = Accelerator(cpu=True)
    loader = echo_loader()
    once = accelerator.prepare(loader)
    twice = accelerator.prepare(once)
    unmarked = Accelerator(cpu=True).prepare(loader)
    rebuilt = EchoDataLoader(once.dataset, batch_sampler=echo_plan(once), factor=3)
    for wrapped in (once, twice, unmarked, rebuilt):
        assert type(wrapped.dataset) is EchoedDataset
        assert type(wrapped.dataset.dataset) is Rows
        assert not isinstance(echo_plan(wrapped).sampler, EchoPlan)
    assert Counter(indices_of(batches_of(rebuilt))) == dict.fromkeys(range(100), 3)


def test_epochs_differ_in_order_and_augmentation() -> None:
    loader = prepared()
    first, second = batches_of(loader), batches_of(loader)
    assert indices_of(first) != indices_of(second)
    noises = [{noise for batch in batches for _, noise in batch} for batches in (first, second)]
    assert noises[0].isdisjoint(noises[1])


@WORKERS
def test_state_taken_in_the_loop_resumes_exactly(num_workers: int) -> None:
    loader = prepared(num_workers=num_workers)
    batches_of(loader)
    states, batches = [], []
    for batch in loader:
        states.append(through_file(echo_plan(loader).state_dict()))
        batches.append(batch.tolist())
    third = batches_of(loader)
    for number in (1, 5, len(batches) - 1, len(batches)):
        assert states[number - 1]["num_batches"] == number
        again = prepared(num_workers=num_workers)
        echo_plan(again).load_state_dict(states[number - 1])
        assert batches_of(again) == batches[number:]
        assert batches_of(again) == third


def test_skip_first_batches_yields_the_rest() -> None:
    torch.manual_seed(1)
    expected = batches_of(prepared(num_workers=2))
    torch.manual_seed(1)
    loader = prepared(num_workers=2)
    rest = skip_first_batches(loader, 30)
    assert batches_of(rest) == expected[30:]
    assert batches_of(loader) != expected  # the next epoch
    assert echo_plan(loader).stats().epochs == 2


def test_end_of_dataloader_is_true_at_the_last_batch_only() -> None:
    loader = prepared(61)
    ends = [loader.end_of_dataloader for _ in loader]
    assert ends == [False] * 22 + [True]


def test_metrics_get_every_use_of_the_last_batch() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(echo_loader(61))
    assert sum(len(accelerator.gather_for_metrics(batch)) for batch in loader) == 3 * 61


def test_iterable_data_set_in_one_process_is_augmented_anew_in_each_epoch() -> None:
    loader = Accelerator(cpu=True).prepare(EchoDataLoader(Stream(40), 8, factor=2, augment=add_noise))
    epochs = [batches_of(loader), batches_of(loader)]
    for batches in epochs:
        assert Counter(indices_of(batches)) == dict.fromkeys(range(40), 2)
    noises = [{noise for batch in batches for _, noise in batch} for batches in epochs]
    assert noises[0].isdisjoint(noises[1])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_loaders_of_torchdata_keep_the_echo() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(echo_loader())
    for _ in range(2):
        assert Counter(indices_of(batches_of(loader))) == dict.fromkeys(range(100), 3)
    assert echo_plan(loader).stats().reads == 200


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return results_of("accelerate_ranks", folder)


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_recognise_the_loader_and_wrap_once(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in (rank[name] for rank in ranks):
        assert seen["is_loader"]
        assert seen["dataset"] == ["EchoedDataset", "Rows"]


@pytest.mark.parametrize("name", [*SHARED, "1"])
def test_two_processes_make_equally_many_full_batches(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in (rank[name] for rank in ranks):
        assert [len(batches) for batches in seen["epochs"]] == [seen["len"]] * 3
        assert {len(batch) for batches in seen["epochs"] for batch in batches} == {8}
    assert ranks[0][name]["len"] == ranks[1][name]["len"]


@pytest.mark.parametrize("name", SHARED)
def test_no_example_is_on_two_processes(ranks: list[dict[str, Any]], name: str) -> None:
    for epoch in range(3):
        first, second = (set(indices_of(rank[name]["epochs"][epoch])) for rank in ranks)
        assert first.isdisjoint(second)
        assert first | second == set(range(64 if name.startswith("64") else 61))


@pytest.mark.parametrize("name", [*SHARED[:5], "1"])
def test_two_processes_use_each_example_its_number_of_times_at_least(
    ranks: list[dict[str, Any]], name: str
) -> None:
    least = {"2.5": 2, "1": 1}.get(name, 3)
    for epoch in range(3):
        counts = sum((Counter(indices_of(rank[name]["epochs"][epoch])) for rank in ranks), Counter[int]())
        assert min(counts.values()) == least
        assert len(counts) == (64 if name.startswith("64") else 61)
        num_added = counts.total() - least * len(counts)
        assert num_added < (8 * 4 if name != "2.5" else len(counts))


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_read_each_example_once_an_epoch(ranks: list[dict[str, Any]], name: str) -> None:
    n = 64 if name.startswith("64") else 61
    assert sum(rank[name]["reads"] for rank in ranks) == 3 * n
    for seen in (rank[name] for rank in ranks):
        assert (seen["reread"], seen["num_epochs"]) == (0, 3)
        assert seen["uses"] == sum(len(indices_of(batches)) for batches in seen["epochs"])


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_resume_exactly(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in (rank[name] for rank in ranks):
        assert seen["position"] == 3
        assert seen["rest"] == seen["epochs"][1][3:]
        assert seen["third again"] == seen["epochs"][2]


@pytest.mark.parametrize("name", SHARED)
def test_augmentation_differs_between_processes_and_uses(ranks: list[dict[str, Any]], name: str) -> None:
    noises = [noise for rank in ranks for epoch in rank[name]["epochs"] for batch in epoch for _, noise in batch]
    assert len(set(noises)) == len(noises)


def test_processes_with_other_global_seeds_share_one_order(ranks: list[dict[str, Any]]) -> None:
    for name in ("unseeded", "seedable"):
        for epoch in range(2):
            counts = sum((Counter(indices_of(rank[name][epoch])) for rank in ranks), Counter[int]())
            assert counts == dict.fromkeys(range(64), 2)
        assert indices_of(ranks[0][name][0]) != indices_of(ranks[0][name][1])


def test_auto_makes_equally_many_batches_on_both_processes(ranks: list[dict[str, Any]]) -> None:
    for first, second in zip(*(rank["auto"]["epochs"] for rank in ranks), strict=True):
        assert len(first) == len(second)
        assert set(indices_of(first)).isdisjoint(indices_of(second))
    assert ranks[0]["auto"]["in force"] == ranks[1]["auto"]["in force"]
    assert all(1 <= rank["auto"]["factor"] <= 3 for rank in ranks)


def test_skip_first_batches_on_two_processes(ranks: list[dict[str, Any]]) -> None:
    for seen in (rank["skipped"] for rank in ranks):
        assert seen["rest"] == seen["first"][4:]
        assert seen["position"] == 7
        assert len(seen["second"]) == len(seen["first"])


def test_split_batches_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["split"].startswith("split_batches=True cuts each batch into pieces for the processes")


def test_iterable_data_set_that_accelerate_would_deal_out_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["stream"].startswith("Accelerate would deal the echoed examples out among the processes")


def test_dispatched_batches_are_read_by_process_0_and_resume_exactly(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["dispatched"] for rank in ranks)
    assert first["reads"] == 61
    assert len(first["rows"]) == len(second["rows"]) == first["len"] == second["len"]
    counts = Counter(indices_of(first["rows"] + second["rows"]))
    assert min(counts.values()) == 3
    assert counts.total() - 3 * 61 <= 2
    assert first["rest"] == first["rows"][5:]
    assert second["rest"][:-1] == second["rows"][5:-1]  # Accelerate makes the last one up with its first ones
    assert len(first["second"]) == len(second["second"])


def test_iterable_data_set_that_accelerate_dispatches_is_echoed(ranks: list[dict[str, Any]]) -> None:
    epochs = [
        ranks[0]["stream dispatched"]["epochs"][at] + ranks[1]["stream dispatched"]["epochs"][at] for at in (0, 1)
    ]
    for batches in epochs:
        assert Counter(indices_of(batches)) == dict.fromkeys(range(64), 2)
    assert len({noise for batches in epochs for batch in batches for _, noise in batch}) == 256


def test_gradients_are_accumulated_to_the_end_of_the_loader(ranks: list[dict[str, Any]]) -> None:
    for steps in (rank["accumulated"] for rank in ranks):
        expected = [number % 4 == 0 for number in range(1, len(steps) + 1)]
        expected[-1] = True
        assert steps == expected
        assert len(steps) == 12


def test_metrics_get_every_use_from_both_processes(ranks: list[dict[str, Any]]) -> None:
    for counts in (rank["metrics"] for rank in ranks):
        assert counts["3"] == [16] * 12
        assert counts["1"] == [16] * 3 + [13]  # without echoing Accelerate makes up the last batch, and cuts it
