"""The loader of a run that echoes in the workers: what it yields, what is counted, and what it refuses."""

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from stretto import EchoDataLoader
from stretto.study import Condition, TrainError, make_loader, run
from tests.study.toys import BATCH_SIZE, NUM_EXAMPLES, PARAMS, WORKERS, augment, learn, loader_of, make_study

EPOCH = 4 * NUM_EXAMPLES // BATCH_SIZE  # updates


class Counting(Dataset[torch.Tensor]):
    """The numbers from 0 on, and how often each was read in this process."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        self.reads[index] += 1
        return (torch.tensor(index),)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Rows(Dataset[Any]):
    """A data set that makes a whole batch, and has no way to give an example."""

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.as_tensor(indices)
        return at, -at


class Point(NamedTuple):
    x: Any
    name: np.ndarray


class Doubling(DataLoader[Any]):
    """A loader with a way of its own to yield batches."""

    def __iter__(self) -> Any:
        return ([2 * x for x in batch] for batch in super().__iter__())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_EXAMPLES))


def take(
    num_updates: int, condition: Condition = WORKERS, seed: int = 0, loader: Any = None, **options: Any
) -> tuple[list[list[float]], int]:
    """The batches of the first updates as lists, and the fresh examples read for them."""
    make = make_loader(condition, seed)
    if loader is None:
        loader = DataLoader(TensorDataset(torch.arange(NUM_EXAMPLES)), BATCH_SIZE, shuffle=True, **options)
    batches = [numbers.tolist() for (numbers,) in islice(make(loader, augment), num_updates)]
    fresh = make.fresh_examples
    make.close()
    assert make.fresh_examples == fresh
    return batches, fresh


def raw(loader: Any, num_updates: int, condition: Condition = WORKERS) -> list[Any]:
    """The batches of the first updates, without an augmentation."""
    make = make_loader(condition, 0, has_augment=False)
    batches = list(islice(make(loader), num_updates))
    make.close()
    return batches


def uses(batches: list[list[float]]) -> Counter[int]:
    return Counter(int(number) for batch in batches for number in batch)


def test_each_example_is_read_once_a_pass_and_used_as_often_as_the_factor_says_and_passes_run_on() -> None:
    data = Counting()
    batches, fresh = take(2 * EPOCH, loader=DataLoader(data, BATCH_SIZE, shuffle=True))
    for first in (0, EPOCH):
        assert uses(batches[first : first + EPOCH]) == dict.fromkeys(range(NUM_EXAMPLES), 4)
    assert batches[:EPOCH] != batches[EPOCH:]
    assert data.reads == dict.fromkeys(range(NUM_EXAMPLES), 2)
    assert fresh == 2 * NUM_EXAMPLES
    assert data.epochs[-1] == 1


def test_an_example_counts_from_its_first_use_on() -> None:
    for num_updates in (1, 2, 3, 5, 8, 13, 20, EPOCH - 3, EPOCH, EPOCH + 1, EPOCH + 9):
        data = Counting()
        batches, fresh = take(num_updates, loader=DataLoader(data, BATCH_SIZE, shuffle=True))
        assert fresh == len(uses(batches[:EPOCH])) + len(uses(batches[EPOCH:])) == data.reads.total()


def test_every_use_has_an_augmentation_of_its_own() -> None:
    numbers = [number for batch in take(2 * EPOCH)[0] for number in batch]
    assert len(set(numbers)) == len(numbers)


def test_two_runs_with_one_seed_get_the_same_batches_and_another_seed_others() -> None:
    assert take(60) == take(60)
    assert take(60)[0] != take(60, seed=1)[0]


def test_a_pass_has_the_same_examples_and_augmentations_with_any_number_of_workers() -> None:
    none, one, two = (take(2 * EPOCH, num_workers=num_workers) for num_workers in (0, 1, 2))
    assert one == none
    assert two == take(2 * EPOCH, num_workers=2, prefetch_factor=3, persistent_workers=True)
    for first in (0, EPOCH):
        every = [sorted(chain(*batches[first : first + EPOCH])) for batches, _ in (none, two)]
        assert every[0] == every[1]
    assert two[1] == none[1] == 2 * NUM_EXAMPLES


def test_what_workers_read_ahead_does_not_count() -> None:
    batches, fresh = take(11, num_workers=2, prefetch_factor=8)
    assert fresh == len(uses(batches)) < NUM_EXAMPLES


def test_a_data_set_that_makes_whole_batches_will_do() -> None:
    loader = DataLoader(Rows(), BATCH_SIZE, shuffle=True, collate_fn=lambda batch: batch)
    batches = raw(loader, EPOCH)
    assert all(type(batch) is tuple for batch in batches)
    assert all(torch.equal(x, -y) and x.shape == (BATCH_SIZE,) for x, y in batches)
    assert Counter(chain(*(x.tolist() for x, _ in batches))) == dict.fromkeys(range(NUM_EXAMPLES), 4)


def test_batches_have_the_types_and_shapes_that_the_loader_gives_them() -> None:
    def collate(numbers: list[int]) -> dict[str, Point]:
        names = np.array([str(number) for number in numbers], dtype="U8")
        return {"point": Point({"x": torch.tensor(numbers)[:, None]}, names)}

    loader: Any = DataLoader(range(NUM_EXAMPLES), BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type]
    for batch in raw(loader, 5):
        point = batch["point"]
        assert type(point) is Point
        assert point.x["x"].shape == (BATCH_SIZE, 1)
        assert point.name.tolist() == [str(number) for number in point.x["x"][:, 0].tolist()]


def test_fractional_factors_and_auto_work_too() -> None:
    batches, fresh = take(25, Condition("workers", 2.5, 4, BATCH_SIZE))
    assert fresh == NUM_EXAMPLES
    assert set(uses(batches).values()) == {2, 3}
    batches, fresh = take(60, Condition("workers", "auto", 4, BATCH_SIZE))
    assert len(batches) == 60
    assert 60 * BATCH_SIZE / 8 <= fresh <= 60 * BATCH_SIZE


@pytest.mark.parametrize("condition", [WORKERS, Condition("workers", "auto", 4, BATCH_SIZE)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_counts_and_times_as_with_other_variants(condition: Condition, num_workers: int) -> None:
    def train(settings: Any, make: Any, seed: int) -> Iterator[Any]:
        fresh = DataLoader(loader_of().dataset, settings.batch_size, shuffle=True, num_workers=num_workers)
        for update, _ in enumerate(make(fresh, augment), 1):
            yield update

    done = run(make_study(train, target=1000), condition, PARAMS, 0, to_budget=True)
    assert done.status == "missed"
    assert done.final == done.best == done.updates
    assert done.fresh_examples == 200
    assert 50 <= done.updates <= 8 * 50 + 1
    assert 0 < done.wait_s < done.seconds
    assert 0 < done.au_percent < 100
    if condition == WORKERS:  # the last of five passes, up to the first use of its last example
        assert 4 * EPOCH < done.updates <= 5 * EPOCH


def test_a_run_is_the_same_run_again() -> None:
    first, second = (run(make_study(learn), WORKERS, PARAMS, 3) for _ in range(2))
    assert first.status == "reached"
    assert (first.updates, first.fresh_examples) == (second.updates, second.fresh_examples)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_end_with_the_loader_and_its_times_stay(is_persistent: bool) -> None:
    make = make_loader(WORKERS, 0)
    fresh = DataLoader(loader_of().dataset, BATCH_SIZE, num_workers=2, persistent_workers=is_persistent)
    batches = make(fresh, augment)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    make.close()
    assert multiprocessing.active_children() == []
    assert (make.fresh_examples, make.stats().updates) == (BATCH_SIZE, 1)
    assert make.stats().wait_s > 0
    assert next(batches, None) is None


def test_a_worker_init_fn_finds_and_sets_what_the_data_set_has() -> None:
    data = Counting()
    make = make_loader(WORKERS, 0)
    make(DataLoader(data, BATCH_SIZE), augment)
    echoed = make._fed._loader.dataset  # type: ignore[union-attr]
    echoed.file = "open"
    assert vars(data)["file"] == "open"
    assert echoed.reads is data.reads
    make.close()


def indexed(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(TensorDataset(torch.arange(NUM_EXAMPLES)), *arguments, **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: [torch.arange(4)], 'variant "workers" got a list: expected a torch DataLoader over a map-style'),
        (lambda: DataLoader(Stream(), 4), "a DataLoader over a Stream, which is iterable: expected a torch DataL"),
        (indexed(None), "a DataLoader without a batch_size, over batches that are made elsewhere: expected a"),
        (
            indexed(batch_sampler=BatchSampler(SequentialSampler(range(8)), 4, True)),
            "a DataLoader without a batch_size",
        ),
        (
            lambda: Doubling(TensorDataset(torch.arange(NUM_EXAMPLES)), 4),
            "got a Doubling, which yields batches in a way of its own: expected torch's own DataLoader",
        ),
        (
            lambda: EchoDataLoader(TensorDataset(torch.arange(NUM_EXAMPLES)), 4, factor=2),
            "got a EchoDataLoader, which yields",
        ),
        (indexed(8), "the DataLoader has batch_size=8, settings.batch_size is 4: make it with settings.batch_size"),
        (
            indexed(4, num_workers=2, in_order=False),
            "cannot be made of this DataLoader: in_order=False: expected Tr",
        ),
    ],
)
def test_a_loader_that_cannot_be_echoed_in_its_workers_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(TrainError, match=says):
        make_loader(WORKERS, 0)(make(), augment)


def test_a_buffer_without_room_for_a_batch_in_each_worker_is_refused() -> None:
    with pytest.raises(TrainError, match="buffer=4 has room for 4 items, with batches of 4 in 2 workers: expected"):
        take(1, Condition("workers", 2.0, 1, BATCH_SIZE), num_workers=2)


def test_a_pass_without_a_batch_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(1)), BATCH_SIZE, drop_last=True)
    with pytest.raises(TrainError, match="a pass over the data set has 1 examples, no batch of 4: expected"):
        take(1, Condition("workers", 2.0, 4, BATCH_SIZE), loader=loader)


def test_batches_that_cannot_be_joined_are_refused() -> None:
    words: Any = DataLoader(["a", "b", "c", "d"], 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a batch's leaf \[0\] is 'a' of type str: expected tensors or arrays"):
        raw(words, 1)
    mixed: Any = DataLoader([{"x": 1}, {"y": 1}, {"x": 1}, {"y": 1}], 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the batches of single examples differ: one has"):
        raw(mixed, 1)


def offsets(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As an EmbeddingBag takes them: all words in one row, and where each text begins."""
    lengths = torch.tensor([0] + [len(text) for text in texts[:-1]])
    return torch.cat(texts), lengths.cumsum(0)


@pytest.mark.parametrize(
    ("collate_fn", "shapes"),
    [
        (offsets, r"leaf \[0\] has the shapes \(1,\), \(2,\), \(3,\), \(4,\)"),
        (lambda texts: torch.cat([texts[0][:1], texts[0][:1]]), r"itself has the shapes \(2,\)"),
        (lambda texts: texts[0].unsqueeze(0), r"itself has the shapes \(1, 1\), \(1, 2\), \(1, 3\), \(1, 4\)"),
    ],
)
def test_a_batch_that_is_not_a_row_for_each_example_is_refused(collate_fn: Any, shapes: str) -> None:
    texts: Any = [torch.arange(length) for length in (1, 2, 3, 4)]
    with pytest.raises(TypeError, match=f"in batches of a single example {shapes}: expected one row"):
        raw(DataLoader(texts, 4, collate_fn=collate_fn), 1)


def test_a_thread_of_the_training_that_is_in_next_does_not_disturb_the_end() -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Counting):
        def __getitem__(self, index: int) -> tuple[torch.Tensor]:
            asked.set()
            go_on.wait(60)
            return super().__getitem__(index)

    make = make_loader(WORKERS, 0)
    batches = make(DataLoader(Slow(), BATCH_SIZE), augment)
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(next(batches, "over")))
    thread.start()
    assert asked.wait(60)
    make.close()
    go_on.set()
    thread.join(60)
    assert ended == ["over"]
