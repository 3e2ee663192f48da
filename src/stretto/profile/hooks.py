"""Hooks on DataLoader, EchoLoader and Optimizer, so that a Meter sees every loader and optimizer of a process.

`__iter__` is replaced where a class defines it: on DataLoader, on its subclasses that have their own (torchdata's
StatefulDataLoader, a script's), also later ones, and on EchoLoader. A loader's own code may iterate inside,
`super().__iter__()` say: only the outermost call is an iteration of the script's. Accelerate's loaders are left
as they are: they iterate the loader that they were made from, and that one is what waits for data.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, get_worker_info

from stretto.echo.dataloader import EchoDataLoader
from stretto.echo.loader import EchoLoader
from stretto.profile.iteration import is_inside, is_upstream, without_our_frames
from stretto.profile.meter import Meter
from stretto.profile.worker import WorkerSpec, time_fetcher, timed_init


class Hooks:
    """Installed by `install`, gone after `remove`.

    Args:
        meter: what is called.
        num_workers: overrides the workers of loaders iterated with gradients enabled; None leaves them.
        prefetch_factor: the same for batches that each worker makes ahead.
    """

    def __init__(self, meter: Meter, *, num_workers: int | None = None, prefetch_factor: int | None = None) -> None:
        self._meter = meter
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._originals: list[tuple[type, str, Any]] = []
        self._step_hook: Any = None

    def install(self) -> None:
        """Hook all classes there are and those to come."""
        _installed.append(self)
        pending: list[type] = [DataLoader, EchoLoader]
        seen: set[type] = set()
        while pending:
            owner = pending.pop()
            if owner not in seen:
                seen.add(owner)
                self._patch(owner)
                pending += owner.__subclasses__()
        self._watch_subclasses()
        self._originals.append((nn.Module, "train", nn.Module.train))
        nn.Module.train = self._watched_train(nn.Module.train)  # type: ignore[method-assign]
        self._step_hook = register_optimizer_step_post_hook(self._meter.stepped)

    def remove(self) -> None:
        """Put the originals back."""
        _installed.remove(self)
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()
        del DataLoader.__init_subclass__
        self._step_hook.remove()

    def forked(self) -> None:
        """This is a child."""
        self._meter.forked()

    def _watch_subclasses(self) -> None:
        hooks = self

        def patch_subclass(cls: type, **kwargs: Any) -> None:
            super(DataLoader, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
            hooks._patch(cls)

        DataLoader.__init_subclass__ = classmethod(patch_subclass)  # type: ignore[assignment, arg-type]

    def _patch(self, owner: type) -> None:
        if owner.__module__.startswith("accelerate."):
            return
        for name, wrap in (("__iter__", self._timed_iter), ("_get_iterator", self._timed_workers)):
            if (original := vars(owner).get(name)) is not None:
                if name == "__iter__" and owner.__module__.startswith(("torch.", "torchdata.")):
                    wrap = self._timed_iter_of_torch  # noqa: PLW2901
                self._originals.append((owner, name, original))
                setattr(owner, name, wrap(original))

    def _watched_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`eval()` calls it, too, and each module calls it on its children."""
        calls = threading.local()

        @functools.wraps(original)
        def train(module: nn.Module, mode: bool = True) -> Any:
            if getattr(calls, "is_inside", False):
                return original(module, mode)
            calls.is_inside = True
            try:
                result = original(module, mode)
            finally:
                calls.is_inside = False
            self._meter.mode_set(module, mode)
            return result

        return train

    def _timed_iter(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807
            if is_inside(loader):
                return original(loader)
            try:
                return self._meter.begin(loader, lambda: original(loader), self._override)
            except BaseException as error:
                without_our_frames(error)
                raise

        return __iter__

    def _timed_iter_of_torch(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """As `_timed_iter`. The workers that a loader keeps serve its echo: an iteration beside it gets others."""

        @functools.wraps(original)
        def make(loader: Any) -> Iterator[Any]:
            if loader.persistent_workers and not is_upstream() and self._meter.log_of(loader).is_taken:
                batches: Iterator[Any] = loader._get_iterator()
                return batches
            return original(loader)

        return self._timed_iter(make)

    def _override(self, loader: Any) -> None:
        """Set the numbers that --workers and --prefetch ask for."""
        if isinstance(loader, EchoDataLoader | EchoLoader) or getattr(loader, "_iterator", None) is not None:
            return
        if self._num_workers is not None and loader.num_workers != self._num_workers:
            loader.num_workers = self._num_workers
            if self._num_workers == 0:
                loader.prefetch_factor = None
                loader.__dict__["persistent_workers"] = False  # past torch's guard against changes
        if loader.num_workers > 0:
            loader.prefetch_factor = self._prefetch_factor or loader.prefetch_factor or 2

    def _timed_workers(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def _get_iterator(loader: Any) -> Any:
            if get_worker_info() is not None:
                return original(loader)
            log = self._meter.log_of(loader)
            log.passes += 1
            spec = WorkerSpec(str(self._meter.workers_directory()), log.number, log.passes)
            given = loader.worker_init_fn
            loader.worker_init_fn = timed_init(spec, given)
            try:
                batches = original(loader)
            finally:
                loader.worker_init_fn = given
            with contextlib.suppress(AttributeError):  # only where there are no workers
                time_fetcher(batches._dataset_fetcher, spec, -1)
            return batches

        return _get_iterator


_installed: list[Hooks] = []


def _after_fork() -> None:
    for hooks in _installed:
        hooks.forked()


os.register_at_fork(after_in_child=_after_fork)  # once: it cannot be undone
