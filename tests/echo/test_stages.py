"""StagedDataset: stages in order, cut in two, and sent to worker processes."""

import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset

from stretto import StagedDataset
from tests.echo.sources import Numbers
from tests.echo.transforms import Compose


def read(index: int) -> dict[str, int]:
    return {"read": index}


def decode(example: dict[str, int], offset: int = 10) -> dict[str, int]:
    if example["read"] == 7:
        raise KeyError("number seven")
    return {**example, "decode": example["read"] + offset}


def augment(example: dict[str, int]) -> dict[str, int]:
    return {**example, "augment": 2 * example["decode"]}


def read_augmented(example: dict[str, int]) -> dict[str, int]:
    return {**example, "augment": example["augment"] + 1}


class Scaled:
    """A stage that is an object, with an array."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale
        self.table = torch.ones(3)

    def __call__(self, example: dict[str, int]) -> dict[str, int]:
        return {**example, "augment": self.scale * example["decode"]}


class Whole(Numbers):
    """A source that is read in batches."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(indices)
        return [self[index] for index in indices]


class Images(Numbers):
    """A data set with a transform."""

    def __init__(self, n: int, transform: Any) -> None:
        super().__init__(n)
        self.transform = transform

    def __getitem__(self, index: int) -> dict[str, int]:
        return self.transform({"read": index, "decode": index})  # type: ignore[no-any-return]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0])


def three_stages() -> StagedDataset:
    return StagedDataset(Numbers(20), read=read, decode=decode, augment=augment)


def test_an_example_passes_the_stages_in_order() -> None:
    dataset = three_stages()
    assert len(dataset) == 20
    assert dataset[3] == augment(decode(read(3)))
    assert list(dataset.stages) == ["read", "decode", "augment"]
    assert dataset.stages["decode"] is decode
    assert repr(dataset) == "StagedDataset(read, decode, augment)"


def test_stages_may_have_any_name_and_may_be_none() -> None:
    dataset = StagedDataset([5, 6], source=read, self=decode)
    assert dataset[1] == {"read": 6, "decode": 16}
    assert StagedDataset([5, 6])[1] == 6


def test_a_batch_is_asked_of_the_source_at_once_where_it_can_be() -> None:
    source = Whole(20)
    assert StagedDataset(source, read=read).__getitems__([4, 2]) == [{"read": 4}, {"read": 2}]
    assert source.asked == [[4, 2]]
    assert three_stages().__getitems__([4, 2]) == [three_stages()[4], three_stages()[2]]


@pytest.mark.parametrize("after", ["read", "decode", "augment"])
def test_the_parts_of_a_split_make_the_whole(after: str) -> None:
    dataset = three_stages()
    before, rest = dataset.split(after=after)
    assert [*before.stages, *rest.stages] == list(dataset.stages)
    assert list(before.stages)[-1] == after
    assert len(before) == len(dataset)
    assert rest(before[3]) == dataset[3]
    assert pickle.loads(pickle.dumps(rest))(before[3]) == dataset[3]


def test_split_after_an_unknown_stage_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="after='resize': the stages are read, decode, augment"):
        three_stages().split(after="resize")


def test_an_error_keeps_its_type_and_says_in_which_stage_and_where() -> None:
    dataset = three_stages()
    with pytest.raises(KeyError, match="number seven") as failed:
        dataset[7]
    assert failed.value.__notes__ == ['In stage "decode", index 7']
    with pytest.raises(KeyError) as failed:
        dataset.__getitems__([1, 7])
    assert failed.value.__notes__ == ['In stage "decode", index 7']
    before, rest = dataset.split(after="read")
    with pytest.raises(KeyError) as failed:
        rest(before[7])
    assert failed.value.__notes__ == ['In stage "decode"']


@pytest.mark.parametrize("source", [Stream(), 3, {1, 2}])
def test_a_source_that_is_not_map_style_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=f"source is a {type(source).__name__}: expected a map-style data set"):
        StagedDataset(source)
    with pytest.raises(TypeError, match=f"dataset is a {type(source).__name__}: expected a map-style data set"):
        StagedDataset.wrap(source)


def test_a_stage_that_is_not_callable_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="decode=3 is a int: expected a function of an example"):
        StagedDataset([1], read=read, decode=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_run_the_stages(method: str) -> None:
    stages = {"read": read, "decode": functools.partial(decode, offset=5), "augment": Scaled(3)}
    wrapped = StagedDataset.wrap(Images(4, Compose([Scaled(5), read_augmented])))
    dataset = ConcatDataset([StagedDataset(range(4), **stages), wrapped])
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=method)
    assert [batch["augment"].tolist() for batch in loader] == [[15, 18, 21, 24], [1, 6, 11, 16]]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_stage_that_cannot_be_sent_is_named_once(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    unpicklable = {"function": lambda example: example, "object": Scaled(lambda x: x)}
    for stage in unpicklable.values():
        dataset = StagedDataset(range(6), read=read, decode=decode, augment=stage)
        loader = DataLoader(dataset, num_workers=2, multiprocessing_context=method)
        with pytest.raises(ValueError, match="cannot be sent to worker processes") as failed:
            iter(loader)
        message = str(failed.value)
        assert message.startswith('stage "augment" (<')
        assert "spawn and forkserver" in message
        assert "Use a module-level function, a functools.partial" in message
        assert failed.value.__suppress_context__
    assert "Traceback" not in capfd.readouterr().err


def test_fork_sends_any_stage() -> None:
    dataset = StagedDataset(range(4), double=lambda index: 2 * index)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
