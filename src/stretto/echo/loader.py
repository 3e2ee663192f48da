"""EchoLoader: data echoing around any loader.

    loader -> Passes -> Upstream (a thread) -> Residents (plan + buffer) -> augment -> the training step
              |------------------------- Stream ----------------------|

Life cycle: nothing happens until `iter()`, which starts the thread. Every update admits what the factor's rule
asks for and draws one batch. Fresh batches are one stream over all passes (`carry_over=True`) or an epoch is
one pass (`carry_over=False`). `close()`, the end of a `with` block, or forgetting the object ends the thread.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from stretto.echo.factor import Factor
from stretto.echo.gap import EchoGap
from stretto.echo.lengths import batch_size_of, items_in_pass, updates_in_pass, updates_per_epoch
from stretto.echo.order import is_unsharded, sampler_names
from stretto.echo.passes import Position
from stretto.echo.settings import Settings, Unit, check_int, rank_and_world_size
from stretto.echo.stats import Clock, Counters, EchoStats
from stretto.echo.stream import Stream
from stretto.echo.upstream import Upstream
from stretto.state import check_settings, to_plain

_VERSION = 1
_STATE_KEYS = {"settings", "epoch_update", "is_in_epoch", "counters", "stream"}
_GRACE_S = 0.2  # an abandoned iteration waits so long for its thread, which may be in the middle of a fetch


def echo(
    loader: Iterable[Any],
    factor: Factor = 2.0,
    *,
    unit: Unit = "example",
    buffer: int | str | None = None,
    augment: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    max_factor: int | None = None,
    carry_over: bool = True,
    updates_per_epoch: int | None = None,
    checkpoint_buffer: bool = True,
    seed: int = 0,
    copy: bool = True,
) -> "EchoLoader":
    """Use what `loader` yields `factor` times each, shuffled, while a thread fetches more.

    Data echoing after Choi, Passos, Shallue, Dahl, "Faster Neural Network Training with Data Echoing",
    arXiv 1907.05550. With t_up seconds for a fresh batch, t_down for an update and R = t_up / t_down, a run that
    needs u(e) times fewer fresh examples at factor e is u(e) * min(1, R / e) times faster (section 2).

    Args:
        loader: any re-iterable of batches; a batch is any nesting of containers.
        factor: total uses of each item, a number >= 1, or "auto" to use the time the loader leaves.
            A fraction is a probability: 2.5 is two uses, and one more for half the items.
        unit: "example" takes batches apart and draws new ones of B distinct examples, B the rows of the first
            batch; "batch" repeats whole batches of any type.
        buffer: how many items stay resident, or bytes such as "2GiB". Default 64 batches, at most 1 GiB.
        augment: called on every drawn batch, so that each use differs.
        device: where the buffer lives, such as "cuda"; where the batches live by default.
        max_factor: the most uses under "auto". Default 8 for batches up to 4096 examples, 16 above.
        carry_over: True: one stream over all passes; an epoch is round(factor * len(loader)) updates, or with
            "auto" one pass. False: an epoch is one pass, and every fresh item is used exactly its number of
            times ("auto": at least once).
        updates_per_epoch: another length of an epoch (with `carry_over=True`).
        checkpoint_buffer: whether `state_dict` holds the buffer's contents.
        seed: of the draws, of fractional uses, and of samplers that have no generator.
        copy: with unit="batch", hand out copies, so that a step may change its batch in place.

    Raises TypeError or ValueError for arguments that cannot work, naming the value.
    """
    settings = Settings(
        factor=factor,
        unit=unit,
        buffer=buffer,
        augment=augment,
        device=device,
        max_factor=max_factor,
        carry_over=carry_over,
        updates_per_epoch=updates_per_epoch,
        checkpoint_buffer=checkpoint_buffer,
        seed=seed,
        copy=copy,
    )
    return EchoLoader(loader, settings)


class EchoLoader:
    """Batches of echoed data; made by `stretto.echo`. Attributes it lacks are the wrapped loader's."""

    def __init__(self, loader: Iterable[Any], settings: Settings) -> None:
        is_used_up = isinstance(loader, Iterator) and not hasattr(loader, "reset")  # DALI's can be reset
        if is_used_up or not hasattr(type(loader), "__iter__"):
            raise TypeError(
                f"loader is a {type(loader).__name__}: expected a re-iterable such as a DataLoader or a list, "
                "which gives a new iterator for every pass"
            )
        self._loader = loader
        self._settings = settings
        self._counters = Counters()
        self._clock = Clock()
        self._gap = EchoGap()
        self._stream = Stream(loader, settings, self._counters, self._clock)
        self._epoch_update = 0
        self._updates_in_epoch: int | None = None
        self._is_in_epoch = False
        self._is_resuming = False
        self._iteration = 0
        self._is_closed = False
        self._finalizer = weakref.finalize(self, Upstream.close, self._stream.upstream)

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch, or continue the one that a loaded state was saved in. Ends earlier iterators."""
        if self._is_closed:
            raise ValueError("this EchoLoader is closed: make a new one with stretto.echo(...)")
        if not self._stream.has_begun and rank_and_world_size()[1] > 1 and is_unsharded(self._loader):
            warnings.warn(
                f"there are {rank_and_world_size()[1]} ranks, but the wrapped loader's sampler is not sharded: "
                "every rank reads all the data. Use a DistributedSampler, unless only this rank reads (as block 0 "
                "of a split model does)",
                stacklevel=2,
            )
        if self._is_resuming:
            self._is_resuming = False
        else:
            if self._is_in_epoch:
                self._stream.abandon_pass()
            self._epoch_update, self._is_in_epoch = 0, True
            self._stream.pass_is_over = False
        self._updates_in_epoch = updates_per_epoch(self._loader, self._settings)
        self._clock.ended()
        self._iteration += 1
        self._stream.start()
        return _Iteration(self, self._iteration)

    def __len__(self) -> int:
        """Updates in an epoch.

        Raises TypeError where that is not known: with "auto" and around loaders without a length (unless
        `updates_per_epoch` is given), and with `carry_over=False` around loaders that do not say how many
        examples a pass has, until one pass is over.
        """
        settings, stream = self._settings, self._stream
        if (length := updates_per_epoch(self._loader, settings)) is not None:
            return length
        if settings.factor == "auto":
            raise TypeError('factor="auto" has no length: an epoch is one pass. updates_per_epoch=N sets one')
        loader_name = type(self._loader).__name__
        if settings.carry_over:
            raise TypeError(f"the wrapped {loader_name} has no length. updates_per_epoch=N sets one")
        num_items, batch_size = items_in_pass(self._loader, settings)
        num_items = stream.items_per_pass or num_items
        batch_size = stream.residents.batch_size if stream.residents else batch_size
        if num_items is None or batch_size is None:
            raise TypeError(
                f"the wrapped {loader_name} does not say how many examples a pass has: it is known after one pass"
            )
        pass_index = stream.position.pass_index - (stream.pass_is_over and self._is_in_epoch)
        return updates_in_pass(self._loader, settings, pass_index, num_items, batch_size)

    def __getattr__(self, name: str) -> Any:
        """The wrapped loader's attribute."""
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __enter__(self) -> "EchoLoader":
        """Close at the end of the block."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def set_epoch(self, epoch: int) -> None:
        """Number the first pass `epoch`, at a run's start. Once passes have begun they count on by themselves."""
        check_int("epoch", epoch, at_least=0)
        if not self._stream.has_begun:
            self._stream.position.pass_index = epoch

    def take_over(self, iterator: Iterator[Any], position: Position) -> None:
        """Before the first `iter()`: continue with an iterator of the loader's that has come to `position`."""
        self._stream.take_over(iterator, position)

    def give_up(self) -> tuple[Iterator[Any], Position]:
        """Stop fetching: the rest of the loader's pass, for another EchoLoader to take over, and where it begins.

        Nothing that was fetched and not admitted is lost.
        """
        return self._stream.give_up()

    @property
    def loader_has_failed(self) -> bool:
        """Whether what was raised last is the wrapped loader's own error, not one of keeping its batches."""
        return self._stream.loader_has_failed

    def close(self) -> None:
        """End the thread; drop and count what is resident. Statistics stay readable."""
        if not self._is_closed:
            self._is_closed = True
            self._clock.ended()
            self._finalizer()
            self._stream.close()

    @property
    def wrapped(self) -> Iterable[Any]:
        """The loader that it is around."""
        return self._loader

    @property
    def unit_and_factor(self) -> tuple[Unit, Factor]:
        """The settings of those names."""
        return self._settings.unit, self._settings.factor

    def stats(self) -> EchoStats:
        """What has happened so far."""
        counters, clock, residents = self._counters, self._clock, self._stream.residents
        return EchoStats(
            passes=self._stream.position.pass_index,
            epochs=counters.epochs,
            updates=counters.updates,
            fresh_batches=counters.fresh_batches,
            fresh_items=counters.fresh_items,
            uses=counters.uses,
            duplicates=counters.duplicates,
            dropped_uses=counters.dropped_uses,
            resident_items=residents.num_live if residents else 0,
            buffer_bytes=residents.buffer.num_bytes if residents else 0,
            mean_lag_updates=counters.sum_lag / max(1, counters.uses),
            wait_s=clock.wait_s,
            first_wait_s=clock.first_wait_s,
            draw_s=clock.draw_s,
            step_s=clock.step_s,
            echo_gap=self._gap.gap,
        )

    def observe(self, per_example_losses: Any) -> None:
        """Tell the losses of the batch handed out last, for `stats().echo_gap`: does the model memorise the buffer?

        Call it before the next batch is fetched, after some or all updates. It does not wait for a device: losses
        are read at every 100th call, and by `stats()`. Warns once when echoing more cannot help. What was observed
        is not part of a state.

        Args:
            per_example_losses: of the model before the update, in the batch's order: a tensor of shape [B] on any
                device, an array or a sequence of numbers; with unit="batch" any number of them. Those that are not
                finite do not count.

        Raises ValueError for another number of losses, and if there is no batch or it was observed already;
        TypeError for what is no number.
        """
        self._gap.observe(per_example_losses)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly here, for `torch.load(weights_only=True)`. Never waits.

        Raises TypeError, naming the path, if the loader's state or the buffer holds what such a file cannot.
        """
        if self._is_closed:
            raise ValueError("this EchoLoader is closed: save its state before close()")
        return {
            "version": _VERSION,
            "settings": to_plain(self._settings_for_state()),
            "epoch_update": self._epoch_update,
            "is_in_epoch": self._is_in_epoch,
            "counters": asdict(self._counters),
            "stream": self._stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: the next `iter()` yields the rest of that epoch.

        A loader without a state of its own is iterated again up to the position.

        Raises ValueError if a setting differs from the saved one, with both values, or if the order of the
        loader's sampler cannot be made again.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION or not state.keys() >= _STATE_KEYS:
            raise ValueError(
                f"the state is a {type(state).__name__} of version {version!r}, expected {_VERSION}: it was "
                "not saved by EchoLoader.state_dict, or by another version of stretto"
            )
        check_settings(state["settings"], self._settings_for_state())
        state = to_plain(state)  # a checkpoint may have been loaded onto an accelerator
        self._stream.load_state_dict(state["stream"])
        self._counters.load(state["counters"])
        self._epoch_update = state["epoch_update"]
        self._is_in_epoch = self._is_resuming = state["is_in_epoch"]
        self._gap.forget_batch()
        self._iteration += 1

    def _settings_for_state(self) -> dict[str, Any]:
        return self._settings.for_state(self._loader, batch_size_of(self._loader), sampler_names(self._loader))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an EchoLoader cannot be pickled or copied, it has a thread and an open iterator: make one where it is "
            "used, with stretto.echo(...), and hand its state_dict() over"
        )

    def _next(self, iteration: int) -> Any:
        """One update's batch."""
        if iteration != self._iteration or self._is_closed:
            reason = "is closed" if self._is_closed else "has begun another iteration or loaded a state since"
            raise RuntimeError(f"this iterator is over: its EchoLoader {reason}")
        self._clock.asked()
        try:
            return self._update()
        except BaseException:
            self._clock.ended()  # what follows is not a step
            raise

    def _update(self) -> Any:
        is_over = not self._is_in_epoch or self._epoch_update == self._updates_in_epoch
        drawn = None if is_over else self._stream.draw()
        if drawn is None:
            self._counters.epochs += self._is_in_epoch
            self._is_in_epoch = False
            self._stream.upstream.stop()
            raise StopIteration
        self._epoch_update += 1
        batch = self._augment(drawn.batch)
        self._gap.handed_out(drawn.kinds, is_whole=self._settings.unit == "batch")
        self._clock.drawn()
        return batch

    def _augment(self, batch: Any) -> Any:
        if self._settings.augment is None:
            return batch
        try:
            return self._settings.augment(batch)
        except StopIteration as stray:  # as it is, it would look like the end of the epoch
            raise RuntimeError("augment raised StopIteration") from stray

    def _abandon(self, iteration: int) -> None:
        """The iterator was dropped."""
        if iteration == self._iteration and not self._is_closed:
            self._clock.ended()
            self._stream.upstream.stop(_GRACE_S if self._is_in_epoch else 0)


class _Iteration(Iterator[Any]):
    """One epoch's iterator."""

    def __init__(self, loader: EchoLoader, iteration: int) -> None:
        self._loader = loader
        self._iteration = iteration

    def __next__(self) -> Any:
        return self._loader._next(self._iteration)

    def __del__(self) -> None:
        self._loader._abandon(self._iteration)
