"""An EchoLoader in the place of a script's training loader, in the middle of its first iteration.

The script keeps its number of updates: an iteration still yields len(loader) batches, drawn from about
len(loader) / e fresh ones, and the loader's passes run on over the script's epochs. So schedules stay right, and
the run ends sooner.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from stretto.echo.buffer import CannotPoolError
from stretto.echo.dataloader import EchoDataLoader
from stretto.echo.factor import Factor
from stretto.echo.loader import EchoLoader, echo
from stretto.echo.order import samplers_of
from stretto.echo.passes import Position
from stretto.echo.settings import Unit, loader_length
from stretto.profile.batches import can_be_pooled, describe_echo
from stretto.profile.iteration import Iteration, LoaderLog, busy
from stretto.profile.pipeline import HELPS_FROM_R

_STEPS_TO_MEASURE = 16  # before the factor of loaders that are iterated together is fixed
_MAX_FACTOR = 8.0
_BATCHES_TOGETHER = 16  # in the buffers of such loaders, equally many in each
_NO_LENGTH = (
    "how long a pass is was not known before one was over, so the script's number of updates could not be kept: "
    "use stretto.echo(loader) or stretto.EchoDataLoader in the script"
)


class Echoing:
    """Decides for each iteration of a training loader whether, and how, it is echoed.

    Args:
        factor: as for `stretto.echo`.
    """

    def __init__(self, factor: Factor) -> None:
        self._factor = factor
        self._echoed: dict[LoaderLog, _Echoed] = {}
        self._factor_together: float | None = None

    def __call__(self, iteration: Iteration, together: list[Iteration]) -> Iterator[Any] | None:
        """What yields the rest of the iteration; None to leave it as it is.

        Args:
            iteration: of a loader that is known to train.
            together: all such iterations that are open now, more than one where loaders are zipped.
        """
        log = iteration.log
        if (echoed := self._echoed.get(log)) is not None:
            return echoed.rest_of(iteration)
        if log.why_not_echoed not in (None, _NO_LENGTH):
            return None
        log.why_not_echoed = self._why_not(iteration) or self._why_not_together(iteration, together)
        if iteration.batches is None or log.why_not_echoed is not None:
            return None
        factor, buffer = self._choose(iteration, together)
        if factor is None:
            return None
        try:
            echoed = _Echoed(iteration, factor, buffer, is_alone=len(together) < 2)
        except (TypeError, ValueError) as error:  # such as a loader that is its own iterator
            log.why_not_echoed = str(error)
            return None
        self._echoed[log] = echoed
        return echoed.rest_of(iteration)

    def _why_not_together(self, iteration: Iteration, together: list[Iteration]) -> str | None:
        """Their batches may belong together: all are echoed, or none."""
        for one in together:
            if one is not iteration and (one.log.why_not_echoed or self._why_not(one)):
                return f"it is iterated together with another {type(one.loader).__name__} that cannot be"
        return None

    @staticmethod
    def _why_not(iteration: Iteration) -> str | None:
        loader = iteration.loader
        if isinstance(loader, EchoLoader | EchoDataLoader):
            return "it echoes already"
        if _length(iteration) is None:
            return _NO_LENGTH
        for look in iteration.log.looks:
            if look["num_bytes"] is None:
                return f"its batches cannot be looked at: {look['why_not']}"
        return None

    def _choose(self, iteration: Iteration, together: list[Iteration]) -> tuple[Factor | None, int | None]:
        """The factor and the buffer, in batches; (None, None) while it is being measured."""
        if len(together) < 2:
            return self._factor, None
        # Loaders that are iterated together may belong together, item by item: what is drawn has to be the same in
        # each, so it must not depend on when batches arrive, nor on whether they can be taken apart.
        if self._factor != "auto":
            return self._factor, _BATCHES_TOGETHER
        if self._factor_together is None:
            if iteration.num_steps < _STEPS_TO_MEASURE:
                return None, None
            waited = sum(one.wait_s for one in together)
            elapsed = iteration.elapsed_s
            self._factor_together = round(min(_MAX_FACTOR, elapsed / max(elapsed - waited, 1e-9)), 1)
        if self._factor_together < HELPS_FROM_R:
            iteration.log.why_not_echoed = (
                f"R is {self._factor_together:.1f} for the {len(together)} loaders that are iterated together"
            )
            return None, None
        return self._factor_together, _BATCHES_TOGETHER


def _length(iteration: Iteration) -> int | None:
    """Batches in a pass: by `len` where torch counts a map-style data set, else as in the last whole pass."""
    loader = iteration.loader
    is_counted = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_counted and type(loader).__len__.__module__.startswith(("torch.", "torchdata.")):
        return loader_length(loader)
    return iteration.log.pass_length


class _Loader:
    """A loader of the script's, held weakly: when the script drops it, its workers are to end.

    To an EchoLoader it is the loader, also by `isinstance`.
    """

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_held", weakref.ref(loader))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        loader = self._held()
        return _Loader if loader is None else type(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._held(), name, value)


class _Echoed:
    """A training loader's EchoLoader, from one iteration of the script's to the next."""

    def __init__(self, iteration: Iteration, factor: Factor, buffer_batches: int | None, *, is_alone: bool) -> None:
        assert iteration.batches is not None
        self._log = iteration.log
        self._loader = _Loader(iteration.loader)
        self._factor = factor
        self._buffer_batches = buffer_batches
        self._plain: Iterator[Any] | None = None
        """What is left of the iteration in which echoing was given up."""
        self._began_at = iteration.updates
        epochs = [getattr(sampler, "epoch", None) for sampler in samplers_of(self._loader)]
        numbers = [epoch for epoch in epochs if isinstance(epoch, int)]
        position = Position(max([iteration.log.iterations - 1, *numbers]), iteration.num_given)
        is_pooled = is_alone and can_be_pooled(iteration.log.looks)
        self._open("example" if is_pooled else "batch", iteration.batches, position)
        weakref.finalize(iteration.loader, self._close).atexit = False

    def _open(self, unit: Unit, batches: Iterator[Any], position: Position) -> None:
        rows = self._log.looks[0]["num_examples"] if unit == "example" else 1
        buffer = None if self._buffer_batches is None else self._buffer_batches * max(1, rows)
        self._unit = unit
        self._echo: EchoLoader = echo(
            self._loader, self._factor, unit=unit, buffer=buffer, updates_per_epoch=1 << 62
        )
        self._echo.take_over(batches, position)
        with busy(self._echo):
            self._batches = iter(self._echo)
        self._log.read_echo, self._log.is_taken = self.describe, True

    def rest_of(self, iteration: Iteration) -> Iterator[Any] | None:
        """As many batches as the loader's own iteration has left; None once echoing was given up."""
        if self._log.why_not_echoed is not None:
            self._plain = None
            return None
        num_left = (_length(iteration) or 0) - iteration.num_given
        iteration.let_go()
        return (self._next() for _ in range(num_left))

    def _next(self) -> Any:
        if self._plain is not None:
            return next(self._plain)
        try:
            with busy(self._echo):
                return next(self._batches)
        except Exception as error:
            if self._echo.loader_has_failed:
                raise
            self._fall_back(error)
        return self._next()

    def _fall_back(self, error: Exception) -> None:
        """Batches cannot be kept as they were: repeat whole ones from here on, or none."""
        batches, position = self._echo.give_up()
        self._log.echo = self.describe() if self._echo.stats().updates else None
        self._echo.close()
        if self._unit == "example" and isinstance(error, CannotPoolError):
            self._open("batch", batches, position)
            return
        self._log.why_not_echoed = f"no longer after {self._echo.stats().updates} batches: {error}"
        self._log.read_echo, self._log.is_taken = None, False
        self._plain = self._passes(batches)

    def _passes(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The rest of a pass, and passes after it as the script's iteration needs them."""
        yield from batches
        while True:
            yield from iter(self._loader)

    def _close(self) -> None:
        """The script has dropped the loader."""
        if self._log.read_echo is not None:
            self._log.echo, self._log.read_echo = self.describe(), None
            self._echo.close()

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return describe_echo(self._echo, self._unit, self._factor, self._began_at)
