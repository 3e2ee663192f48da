"""A loader whose pace floats, in updates: two of them to a fresh batch for a while, then six, then two."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from stretto.study import MakeLoader, Settings
from stretto.study.study import Train, Value

PACES = (2, 6)
_BATCHES = 20  # at one pace
_PATIENCE_S = 5.0  # a loader that waits for updates, which wait for it, gives a batch


class _Paced:
    """Batches of `fresh`, each after as many updates as its place says."""

    def __init__(self, fresh: Iterable[Any]) -> None:
        self.base_dataloader = fresh
        self._updates = 0
        self._due = 0
        self._batches = 0
        self._changed = threading.Condition()

    def updated(self) -> None:
        """An update was made."""
        with self._changed:
            self._updates += 1
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        for batch in self.base_dataloader:
            with self._changed:
                self._changed.wait_for(lambda: self._updates >= self._due, _PATIENCE_S)
            self._due += PACES[self._batches // _BATCHES % len(PACES)]
            self._batches += 1
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)


def train_under_load(train: Train, settings: Settings, make_loader: MakeLoader, seed: int) -> Iterator[Value]:
    """`train`, with fresh batches at a floating pace: what "auto" finds at a loader whose R floats like that."""
    paced: list[_Paced] = []

    def make_paced(fresh: Iterable[Any], augment: Any = None) -> Iterator[Any]:
        paced.append(_Paced(fresh))
        return make_loader(paced[0], augment)

    for value in train(settings, make_paced, seed):
        yield value
        paced[0].updated()
