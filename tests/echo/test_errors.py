"""What the loader raises comes out in the consumer, at the right update, with its traceback."""

import gc
import itertools
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stretto
from stretto.echo.buffer import TensorPool
from tests.echo.sources import (
    Failing,
    Numbers,
    await_arrivals,
    epoch,
    flat,
    id_batches,
    state_after,
    upstream_threads,
)
from tests.patience import PATIENCE_S


class TwoArgumentsError(Exception):
    """Cannot be made from a message alone."""

    def __init__(self, shard: str, code: int) -> None:
        super().__init__(f"shard {shard} failed with {code}")


ERRORS: list[tuple[type[BaseException], list[Any]]] = [
    (ValueError, ["no such shard"]),
    (TwoArgumentsError, ["train-07", 404]),
    (KeyError, ["k"]),
    (SystemExit, [3]),
]


@pytest.mark.parametrize(("kind", "arguments"), ERRORS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("factor", [1, 2, "auto"])
def test_the_original_error_surfaces_with_the_traceback_of_the_loader(
    kind: type[BaseException], arguments: list[Any], factor: Any
) -> None:
    error = kind(*arguments)
    with stretto.echo(Failing(id_batches(5, 2), 3, error), factor) as loader, pytest.raises(kind) as caught:
        list(loader)
    assert caught.value is error
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "__iter__"  # of Failing, the line that raised
    assert frames[0].startswith("test_the_original_error")


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("factor", [1, 2, 2.5, 4])
def test_the_error_surfaces_at_the_update_whose_admission_needed_the_batch(factor: float, at: int) -> None:
    settings: dict[str, Any] = {"factor": factor, "buffer": 5}
    with stretto.echo(id_batches(5, 2), **settings) as loader:
        needed = [loader.stats().fresh_batches for _ in loader]
    with stretto.echo(Failing(id_batches(5, 2), at, LookupError()), **settings) as loader:
        with pytest.raises(LookupError):
            list(loader)
        assert loader.stats().updates == sum(fresh <= at for fresh in needed)


def test_auto_raises_at_the_next_update() -> None:
    with stretto.echo(Failing(id_batches(5, 2), 1, LookupError()), "auto") as loader:
        iterator = iter(loader)
        next(iterator)
        await_arrivals(loader)
        with pytest.raises(LookupError):
            next(iterator)


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize("unit", ["example", "batch"])
def test_iterating_again_after_an_error_continues(unit: str, carry_over: bool) -> None:
    source = Failing(id_batches(5, 4), 3, LookupError())
    with stretto.echo(source, 2, unit=unit, buffer=8, carry_over=carry_over) as loader:
        for _ in range(3):
            with pytest.raises(LookupError):
                list(loader)
        fresh = loader.stats().fresh_batches
        source.repair()
        epochs = [epoch(loader) for _ in range(3)]
        assert [len(batches) for batches in epochs] == [10, 10, 10]
        assert set(flat(flat(epochs))) == set(range(20))
        assert loader.stats().fresh_batches >= fresh + 10


def test_an_error_of_the_first_batch_after_a_resume_loses_nothing() -> None:
    settings: dict[str, Any] = {"factor": 2, "buffer": 6}
    with stretto.echo(id_batches(5, 2), **settings) as loader:
        whole = epoch(loader)
    source = Failing(id_batches(5, 2), 2, LookupError("gone"))
    state = state_after(stretto.echo(source, **settings), 3)
    with stretto.echo(source, **settings) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        with pytest.raises(LookupError, match="gone"):
            next(iterator)
        source.repair()
        assert [batch.tolist() for batch in iterator] == whole[3:]


@pytest.mark.parametrize("at", range(1, 6))
def test_an_error_while_a_batch_is_copied_surfaces_and_loses_nothing(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are made by either thread, whoever comes first."""
    calls, put = itertools.count(), TensorPool.put

    def failing_put(pool: TensorPool, *arguments: Any) -> None:
        if next(calls) == at:
            raise MemoryError
        put(pool, *arguments)

    monkeypatch.setattr(TensorPool, "put", failing_put)
    with stretto.echo(id_batches(8, 2), 1, buffer=2) as loader:
        iterator = iter(loader)
        seen = [next(iterator).tolist() for _ in range(at)]
        with pytest.raises(MemoryError):
            next(iterator)
        seen += [batch.tolist() for batch in iterator]
    assert sorted(flat(seen)) == list(range(16))


def test_asking_the_same_iterator_again_tries_the_failed_batch_again() -> None:
    source = Failing(id_batches(5, 2), 3, LookupError())
    with stretto.echo(source, 1, buffer=2) as loader:
        iterator = iter(loader)
        seen = [next(iterator).tolist() for _ in range(3)]
        for _ in range(2):
            with pytest.raises(LookupError):
                next(iterator)
        source.repair()
        assert sorted(flat(seen + [batch.tolist() for batch in iterator])) == list(range(10))


def message_of_error(loader: stretto.EchoLoader) -> str:
    try:
        list(loader)
    except (RuntimeError, TwoArgumentsError) as error:
        return str(error)
    return ""


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise TwoArgumentsError("train-07", 404)
        return index


def test_an_error_of_a_worker_process_surfaces_with_the_traceback_of_the_worker() -> None:
    with stretto.echo(DataLoader(Broken(8), 2, num_workers=2), 1) as loader:
        message = message_of_error(loader)
    assert "TwoArgumentsError: shard train-07 failed with 404" in message
    assert "in __getitem__" in message


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_an_error_that_is_forgotten_frees_the_loader_without_the_garbage_collector() -> None:
    """A DataLoader iterator that only the garbage collector ends waits five seconds for each of its workers."""
    batches = DataLoader(Broken(8), 2)
    source = weakref.ref(batches)
    assert "shard train-07" in message_of_error(stretto.echo(batches, 1))
    del batches
    for thread in upstream_threads():
        thread.join(PATIENCE_S)
    assert source() is None


class EndsTooEarly:
    """`next` without a default inside `__iter__`: a StopIteration that is a mistake."""

    def __iter__(self) -> Any:
        return next(iter([]))


def test_a_stray_stop_iteration_does_not_end_the_epoch_silently() -> None:
    with stretto.echo(EndsTooEarly(), 1) as loader, pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)


def test_a_stray_stop_iteration_of_augment_does_not_end_the_epoch_silently() -> None:
    def augment(batch: torch.Tensor) -> torch.Tensor:
        return next(iter([]))

    with stretto.echo(id_batches(3, 2), 1, augment=augment) as loader, pytest.raises(RuntimeError, match="augment"):
        list(loader)


def test_an_error_of_augment_surfaces_and_the_next_update_goes_on() -> None:
    def augment(batch: torch.Tensor) -> torch.Tensor:
        if 3 in batch.tolist():
            raise ZeroDivisionError
        return batch

    with stretto.echo(id_batches(3, 2), 1, buffer=2, augment=augment) as loader:
        iterator = iter(loader)
        assert next(iterator).sum() == 1
        with pytest.raises(ZeroDivisionError):
            next(iterator)
        assert next(iterator).sum() == 9


@pytest.mark.parametrize("source", [[], DataLoader(Numbers(2), 3, drop_last=True)], ids=["list", "drop_last"])
@pytest.mark.parametrize("factor", [2, "auto"])
@pytest.mark.parametrize("carry_over", [True, False])
def test_an_empty_loader_raises(source: Any, factor: Any, carry_over: bool) -> None:
    with stretto.echo(source, factor, carry_over=carry_over) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="the loader is empty: pass 0 had no batch"):
                list(loader)


def test_a_loader_that_is_empty_the_second_time_raises() -> None:
    class Once(list[torch.Tensor]):
        def __iter__(self) -> Any:
            batches = [*super().__iter__()]
            self.clear()
            return iter(batches)

    source = Once(id_batches(3, 2))
    with (
        stretto.echo(source, 1, updates_per_epoch=9) as loader,
        pytest.raises(ValueError, match="pass 1 had no batch"),
    ):
        list(loader)


def test_a_first_batch_without_examples_raises() -> None:
    with (
        stretto.echo([torch.zeros(0, 3)], 2) as loader,
        pytest.raises(ValueError, match="first batch has 0 examples"),
    ):
        list(loader)


def test_a_batch_that_outgrows_the_buffer_raises() -> None:
    source, message = [torch.zeros(2), torch.zeros(9)], "a batch of 9 examples arrived, the first one had 2"
    with stretto.echo(source, 1, buffer=3) as loader, pytest.raises(ValueError, match=message):
        list(loader)
