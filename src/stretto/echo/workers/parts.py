"""What happens to an example in a worker: before the echo point once, after it for each use.

Every part runs under random states keyed by (seed, epoch, position, use), the parts before the echo point under
use 0. A part that raises ends the run, or with `on_error="skip"` leaves the example out, counted and bounded.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from numpy.typing import NDArray
from torch.utils.data import Subset, get_worker_info

from stretto.echo.keyed import derive_key
from stretto.echo.randomness import KeyedRandomness
from stretto.echo.stages import StagedDataset, Stages
from stretto.echo.workers.board import Board, Count

OnError = Literal["raise", "skip"]
_USE = 0xE5A9  # the purpose of the random states of uses
ABSENT = object()


@dataclass(slots=True)
class ErrorPolicy:
    """What to do with an example that raises."""

    on_error: OnError
    max_skipped: int

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f'on_error={self.on_error!r}: expected "raise" or "skip"')


@dataclass(eq=False)
class Parts:
    """The source of examples, and what runs before and after the echo point.

    Use within `with parts:`, which restores the global random states at its end.
    """

    source: Any
    before: Stages
    after: Stages
    seed: int
    policy: ErrorPolicy
    board: Board
    reading: KeyedRandomness = field(init=False)
    finishing: KeyedRandomness = field(init=False)

    def __post_init__(self) -> None:
        self.reading = KeyedRandomness(self.source, *self.before.stages.values())
        self.finishing = self.reading.beside(*self.after.stages.values())
        self._epoch, self._epoch_key = -1, 0
        self._fetches_together = _fetches_together(self.source)

    @staticmethod
    def of(
        dataset: Any,
        echo_after: str | None,
        augment: Callable[[Any], Any] | None,
        seed: int,
        policy: ErrorPolicy,
        board: Board,
    ) -> "Parts":
        """Cut a map-style data set after the stage `echo_after`, or at its end; `augment` comes last."""
        source, before, after = dataset, Stages({}), Stages({})
        if echo_after is not None:
            dataset, after = StagedDataset.wrap(dataset).split(after=echo_after)
        if isinstance(dataset, StagedDataset):
            source, before = dataset.source, Stages(dataset.stages)
        if augment is not None:
            name = "augment" if "augment" not in after.stages else "augment="
            after = Stages({**after.stages, name: augment})
        return Parts(source, before, after, seed, policy, board)

    def __enter__(self) -> "Parts":
        self.reading.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.reading.__exit__(*exc_info)

    def row(self) -> NDArray[Any]:
        """The counts of this process."""
        worker = get_worker_info()
        return self.board.row(worker.id if worker else 0)

    def _key_of(self, epoch: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._epoch_key = epoch, derive_key(self.seed, _USE, epoch)
        return self._epoch_key

    def fetch(self, wanted: list[tuple[int, int, Any]], row: NDArray[Any]) -> list[Any]:
        """What the source holds for each (epoch, position, index): read at once if the source can, else ABSENT."""
        if not self._fetches_together or len(wanted) < 2:
            return [ABSENT] * len(wanted)
        start = time.perf_counter_ns()
        epoch, position, _ = wanted[0]
        self.reading.seed(position, 0, key=self._key_of(epoch))
        try:
            fetched = self.source.__getitems__([index for _, _, index in wanted])
        except Exception as error:
            self._raise_unless_skipped(error)
            fetched = None  # one by one, to find those that raise
        if not isinstance(fetched, list | tuple) or len(fetched) != len(wanted):  # columns, say
            return [ABSENT] * len(wanted)
        row[Count.READ_NS] += time.perf_counter_ns() - start
        return list(fetched)

    def read(self, epoch: int, position: int, index: Any, row: NDArray[Any], fetched: Any = ABSENT) -> Any:
        """The example at `index`, up to the echo point; `fetched` is what the source holds, if that is known."""
        start = time.perf_counter_ns()
        self.reading.seed(position, 0, key=self._key_of(epoch))
        if fetched is ABSENT:
            try:
                fetched = self.source[index]
            except Exception as error:
                error.add_note(f"In the data set, index {index!r}")
                raise
        example = self.before.run(fetched, index)
        row[Count.READS] += 1
        row[Count.READ_NS] += time.perf_counter_ns() - start
        return example

    def finish(self, example: Any, epoch: int, position: int, use: int, index: Any, row: NDArray[Any]) -> Any:
        """One use of `example`, which belongs to the caller: the stages after the echo point."""
        start = time.perf_counter_ns()
        if self.after.stages:
            self.finishing.seed(position, use + 1, key=self._key_of(epoch))
            example = self.after.run(example, index)
        row[Count.USES] += 1
        row[Count.USE_NS] += time.perf_counter_ns() - start
        return example

    def failed(self, error: Exception, index: Any, row: NDArray[Any]) -> None:
        """An example raised `error`: raise it, or count the example as skipped."""
        self._raise_unless_skipped(error)
        row[Count.SKIPPED] += 1
        if self.board.total(Count.SKIPPED) > self.policy.max_skipped:
            raise RuntimeError(
                f"more than max_skipped={self.policy.max_skipped} examples raised; the last one was index "
                f"{index!r}, with {error!r}. Mend the data, or allow more"
            ) from error
        if row[Count.SKIPPED] == 1:
            warnings.warn(
                f'index {index!r} raised {error!r} and is left out (on_error="skip"); what follows in this worker '
                "is counted only, in stats().skipped",
                stacklevel=2,
            )

    def _raise_unless_skipped(self, error: Exception) -> None:
        if self.policy.on_error == "raise":
            if isinstance(error, StopIteration):  # as it is, it would look like the end of the epoch
                notes = " ".join(getattr(error, "__notes__", []))
                raise RuntimeError(f"StopIteration was raised: {notes}") from error
            raise error


class Echoed:
    """A data set in the place of `dataset`, whose attributes are read and set through it, in workers too."""

    _OWN: ClassVar[set[str]] = set()

    def __init__(self, dataset: Any, parts: Parts) -> None:
        self.dataset = dataset
        self.parts = parts
        self.board = parts.board

    def __getattr__(self, name: str) -> Any:
        """The data set's own attribute."""
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("dataset", "parts", "board") or name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Number the epoch that is about to begin, for the data set too."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)


def _fetches_together(source: Any) -> bool:
    """Whether the source has a way of its own to read many examples: a Subset only asks the data set under it."""
    while type(source) is Subset:
        source = source.dataset
    return callable(getattr(source, "__getitems__", None))
