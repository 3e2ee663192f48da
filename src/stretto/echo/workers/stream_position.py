"""How far the training step is in the epochs of an iterable data set that is echoed in its workers' streams."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from stretto.echo.settings import rank_and_world_size
from stretto.echo.stats import Clock, Counters, EchoStats
from stretto.echo.workers.board import Board, Count
from stretto.echo.workers.consumer import EpochNumber
from stretto.echo.workers.pace import Pace, is_due
from stretto.echo.workers.ranks import largest
from stretto.state import check_settings

_VERSION = 1


class StreamPosition(EpochNumber):
    """For an iterable data set what an `EchoPlan` is for a map-style one, as far as that is possible.

    The examples of a stream cannot be asked for again, so a state is a number of batches, and loading it reads the
    epoch again from its start. That is exact if the data set yields the same in the same epoch.

    Args:
        board: shared with the workers, which read epoch and factor from it.
        pace: under "auto".
        clock: of the loader.
        settings: what a state and the loader that loads it must have in common.
    """

    def __init__(self, board: Board, pace: Pace | None, clock: Clock, settings: dict[str, Any]) -> None:
        super().__init__()
        self._board = board
        self._pace = pace
        self._clock = clock
        self._settings = settings
        self._counters = Counters()
        self._epoch = 0
        self._is_in_epoch = False
        self._num_given = 0
        self._is_resuming = False
        board.factor = 1.0

    def begin(self, batches: Iterator[Any]) -> None:
        """An epoch begins with `batches`: go on to where a loaded state was saved."""
        self._epoch, self.has_begun, self._is_in_epoch = self.next_epoch, True, True
        self._next_epoch = self._epoch + 1
        num_batches, self._num_given = self._num_given if self._is_resuming else 0, 0
        self._is_resuming = False
        for at in range(num_batches):
            if next(batches, self) is self:
                raise ValueError(
                    f"epoch {self._epoch} of the data set ended after {at} batches, but the state was saved after "
                    f"{num_batches}: it has changed, or it cannot be iterated twice"
                )
        self._num_given = num_batches
        if self._pace is not None:
            self._pace.restart(num_batches)

    def gave(self) -> None:
        """The training step was given one more batch."""
        self._num_given += 1
        self._counters.updates += 1
        if self._pace is not None and is_due(self._num_given):
            self._board.factor = largest(self._pace.factor(self._board.factor, self._num_given))

    def end(self) -> None:
        """The epoch is over."""
        self._counters.epochs += self._is_in_epoch
        self._is_in_epoch = False
        self._num_given = 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the batches that the training step was given. Raises ValueError in an epoch with "auto"."""
        if self._pace is not None and (self._is_in_epoch or self._is_resuming):
            raise ValueError(
                'factor="auto" over an iterable data set has no state within an epoch: what its workers yield '
                "depends on time. Save between epochs, or use a number as factor, or a map-style data set"
            )
        return {
            "version": _VERSION,
            "settings": self._settings_for_state(),
            "epoch": self._epoch if self._is_in_epoch or self._is_resuming else self.next_epoch,
            "is_in_epoch": self._is_in_epoch or self._is_resuming,
            "num_batches": self._num_given,
            "has_begun": self.has_begun,
            "factor": self._board.factor,
            "counters": asdict(self._counters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: the next `iter()` reads that epoch again up to there.

        Raises ValueError if a setting differs, with both values.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION or "num_batches" not in state:
            raise ValueError(
                "the state was not saved by EchoDataLoader.state_dict, or by another version of stretto"
            )
        check_settings(state["settings"], self._settings_for_state())
        self._epoch = self._next_epoch = state["epoch"]
        self._is_resuming, self._is_in_epoch = state["is_in_epoch"], False
        self._num_given, self.has_begun = state["num_batches"], state["has_begun"]
        self._board.factor = state["factor"]
        self._counters.load(state["counters"])

    def observe(self, per_example_losses: Any) -> None:  # noqa: ARG002
        """Raises ValueError: only the workers know which use of an example is in a batch."""
        raise ValueError(
            "observe: the data set is iterable, and only the workers that read it know which examples of a batch "
            "were used before. Expected a map-style data set, or stretto.echo(loader)"
        )

    def stats(self) -> EchoStats:
        """What has happened so far; examples are counted as the workers read and use them, ahead of the updates."""
        total, clock = self._board.total, self._clock
        return EchoStats(
            passes=self._epoch if self._is_in_epoch else self.next_epoch,
            epochs=self._counters.epochs,
            updates=self._counters.updates,
            fresh_batches=math.ceil(total(Count.READS) / (self._settings["batch_size"] or 1)),
            fresh_items=total(Count.READS),
            uses=total(Count.USES),
            duplicates=0,
            dropped_uses=0,
            resident_items=total(Count.RESIDENTS),
            buffer_bytes=total(Count.RESIDENT_BYTES),
            mean_lag_updates=0.0,
            wait_s=clock.wait_s,
            first_wait_s=clock.first_wait_s,
            draw_s=clock.draw_s,
            step_s=clock.step_s,
            reads=total(Count.READS),
            skipped=total(Count.SKIPPED),
        )

    def _settings_for_state(self) -> dict[str, Any]:
        # Not the rank: ranks train in step, and Lightning gives all of them rank 0's state.
        return {**self._settings, "world_size": rank_and_world_size()[1]}
