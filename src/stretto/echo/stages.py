"""A data set as named stages, so that echoing can begin after any of them.

    StagedDataset(source, read=f, decode=g, augment=h)      ds[i] == h(g(f(source[i])))
    before, after = ds.split(after="decode")                after(before[i]) == ds[i]

`StagedDataset.wrap` makes the stages from a data set with a `.transform`: wrap.py defers the transform,
compose.py takes a Compose apart.
"""

from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from stretto.echo.wrap import Indices, stages_of

Function = Callable[[Any], Any]


class Stages:
    """Named functions of an example, called in order: what `StagedDataset.split` cuts off.

    Raises whatever a stage raises, with a note that names the stage.
    """

    def __init__(self, stages: Mapping[str, Function]) -> None:
        for name, function in stages.items():
            if not callable(function):
                raise TypeError(
                    f"{name}={function!r} is a {type(function).__name__}: expected a function of an example"
                )
        self._stages = dict(stages)
        self._can_be_sent = False

    def __reduce__(self) -> tuple[Any, ...]:
        # The plain error of pickle names neither the stage nor the reason to pickle at all.
        if get_spawning_popen() is not None and not self._can_be_sent:
            self._check_picklable()
            self._can_be_sent = True
        return Stages, (self._stages,)

    def __call__(self, example: Any) -> Any:
        """The example after all stages."""
        return self.run(example)

    def __repr__(self) -> str:
        return f"Stages({', '.join(self._stages)})"

    @property
    def stages(self) -> Mapping[str, Function]:
        """The functions by name, in order."""
        return MappingProxyType(self._stages)

    def run(self, example: Any, index: int | None = None) -> Any:
        """The example after all stages. `index` says in an error's note where the example comes from."""
        for name, function in self._stages.items():
            try:
                example = function(example)
            except Exception as error:
                error.add_note(f'In stage "{name}"' + ("" if index is None else f", index {index}"))
                raise
        return example

    def _check_picklable(self) -> None:
        for name, function in self._stages.items():
            try:
                _Trial(_Nowhere()).dump(function)
            except Exception as error:
                # No PicklingError: torch adds a warning to one, about other Python versions.
                raise ValueError(
                    f'stage "{name}" ({function!r}) cannot be sent to worker processes, which the start methods '
                    f"spawn and forkserver do by pickling: {error}. Use a module-level function, a "
                    "functools.partial of one or an object of a module-level class, or "
                    'DataLoader(..., multiprocessing_context="fork")'
                ) from None


class StagedDataset(Dataset[Any]):
    """Named stages over a map-style data set: `ds[i]` is `source[i]` after all stages, in order.

        ds = StagedDataset(paths, read=read_bytes, decode=decode_jpeg, augment=random_crop)

    Every stage is a function of an example that returns an example. With worker processes started by spawn or
    forkserver a stage must be picklable, which a lambda or a local function is not.

    Raises:
        TypeError: `source` is not map-style, or a stage is not callable.
        ValueError: from the start of a worker, a stage cannot be pickled; the message names it.
        Exception: from `ds[i]`, what a stage raises, with a note that names the stage and the index.
    """

    def __init__(self, source: Any, /, **stages: Function) -> None:
        self.source = _check_map_style("source", source)
        self._stages = Stages(stages)

    @classmethod
    def wrap(cls, dataset: Any) -> Self:
        """Take a data set with a `.transform` apart: "read", then one stage for each part of the transform.

        "read" is the data set's `__getitem__`, run on a shallow copy whose `transform`, `target_transform` and
        joint `transforms` are stand-ins: they put off the call, the stages that follow make it, and the last
        one puts the result where the data set put it. So this works for data sets that call the transform and
        return its result, or items of it, in lists, tuples, dicts and other mappings:
        `return self.transform(img), target`, `return self.transform(item)`,
        `return self.transform(image=img)["image"]`, `img, target = self.transforms(img, target)`, and for a
        `Subset` of such a data set. A data set without a transform has the one stage "read".

        A Compose becomes a stage for each of its members, named after its class or function ("Resize",
        "Normalize", "Normalize_2"), where that is equal to calling the Compose:

        - torchvision's (v1 and v2), any other class Compose whose call only loops over `self.transforms`, and
          `nn.Sequential`; also nested in each other. Not: a call that does more, forward hooks.
        - MONAI's, through its own `start` and `end`. Not: `lazy` other than False, `unpack_items`, OneOf,
          SomeOf and RandomOrder; a Compose inside a Compose is one stage.
        - albumentations' (2.0), also nested; its checks of shapes run before its first member. Not: bounding
          box or keypoint parameters, `p` < 1, `save_applied_params`, ReplayCompose, Sequential, OneOf and such,
          other versions with settings unknown here.

        What is not split, and any other transform, is one stage; `target_transform` always is, under its name.

        Raises:
            TypeError: `dataset` is not map-style, or its transform cannot be replaced. From `ds[i]`: the data
                set does something else with a transform's result, such as arithmetic or `.shape`; the message
                says what.
        """
        if isinstance(dataset, cls):
            return dataset
        return cls(Indices(dataset), **stages_of(_check_map_style("dataset", dataset)))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self._stages.run(self.source[index], index)

    def __getitems__(self, indices: Iterable[int]) -> list[Any]:
        """The examples of a batch; a source that has `__getitems__` is asked once for all of them."""
        indices = list(indices)
        if hasattr(self.source, "__getitems__"):
            examples = self.source.__getitems__(indices)
        else:
            examples = (self.source[index] for index in indices)
        return [self._stages.run(example, index) for example, index in zip(examples, indices, strict=True)]

    def __repr__(self) -> str:
        return f"StagedDataset({', '.join(self.stages)})"

    @property
    def stages(self) -> Mapping[str, Function]:
        """The functions by name, in order."""
        return self._stages.stages

    def split(self, after: str) -> tuple["StagedDataset", Stages]:
        """Cut after the stage `after`: the data set up to and with it, and the stages that follow.

        Raises:
            ValueError: there is no such stage.
        """
        names = list(self.stages)
        if after not in names:
            raise ValueError(f"after={after!r}: the stages are {', '.join(names) or 'none'}")
        cut = names.index(after) + 1
        before = {name: self.stages[name] for name in names[:cut]}
        return StagedDataset(self.source, **before), Stages({name: self.stages[name] for name in names[cut:]})


def _check_map_style(name: str, value: Any) -> Any:
    if isinstance(value, IterableDataset) or not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
        raise TypeError(
            f"{name} is a {type(value).__name__}: expected a map-style data set or a sequence, with __getitem__ "
            "and __len__"
        )
    return value


class _Trial(ForkingPickler):
    """Pickles as the start of a worker does, without the arrays, which are large and can always be pickled."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) or (isinstance(obj, np.ndarray) and obj.dtype != object):
            return int, ()
        return NotImplemented


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)
