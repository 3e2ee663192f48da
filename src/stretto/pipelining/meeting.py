"""Rounds in which all processes of a run hear each other, and none is left waiting.

A problem of one process becomes everyone's error, raised at the same place in all of them; a process that fails
elsewhere, or dies, ends the wait of the others.
"""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from stretto.pipelining.failure import BlockFailed

T = TypeVar("T")
_POLL_S = 0.5
_LAST_WORDS_S = 1.0
"""How long after a connection broke the news is awaited that says which process failed."""
_abandoned: list[Any] = []
"""Groups in which an operation waits for a process that will not come."""
_SHARED_KINDS = (FileNotFoundError, FileExistsError, TypeError, ValueError)
"""Errors that are raised as what they are in the processes where they did not arise."""


class Agreed(Exception):  # noqa: N818  (carries the error)
    """Carries an `error` that all processes raise at the same place, so that nobody has to be told."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Meeting(Protocol):
    """All processes of a run."""

    @property
    def rank(self) -> int:
        """Of this process; that of rank 0 does what one must do for all."""

    def hear(self, value: Any) -> list[Any]:
        """The `value` of each process, in the same order in all of them."""

    def refuse(self, error: Exception) -> Exception:
        """What to raise for an `error` that all raise."""

    def close(self) -> None:
        """Leave the others."""


class Alone:
    """A run of one process."""

    rank = 0

    def hear(self, value: Any) -> list[Any]:
        """Its own `value`."""
        return [value]

    def refuse(self, error: Exception) -> Exception:
        """The error itself."""
        return error

    def close(self) -> None:
        """Nobody waits."""


class Together:
    """A run of the processes `ranks`, in a group of its own. Making one is collective.

    `check()` is called while others are awaited; it raises what is known of a failure.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta, check: Callable[[], None]) -> None:
        self._group: Any = dist.new_group(list(ranks), timeout, "gloo", use_local_synchronization=True)
        self._check = check
        self._is_waiting = False
        self.rank: int = self._group.rank()

    def close(self) -> None:
        """Leave the others: whoever waits for this process is told so by the end of the connection."""
        if self._group is None:
            return
        if self._is_waiting:  # the end of a group would wait for what is under way in it
            _abandoned.append(self._group)
        else:
            dist.destroy_process_group(self._group)
        self._group = None  # only the last reference closes the connections

    def hear(self, value: Any) -> list[Any]:
        """The `value` of each process by rank; it is pickled. Raises BlockFailed if a process failed."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self._group.size())]
        self._wait(self._group.allgather([sizes], [torch.tensor([own.numel()])]))
        heard = []
        for sender, size in enumerate(sizes):
            options = dist.BroadcastOptions()
            options.rootRank = sender
            told = own if sender == self.rank else torch.empty(int(size), dtype=torch.uint8)
            self._wait(self._group.broadcast([told], options))
            heard.append(pickle.loads(told.numpy().data))
        return heard

    def refuse(self, error: Exception) -> Exception:
        """An `Agreed` with the error."""
        return Agreed(error)

    def _wait(self, work: Any) -> None:
        arrived = threading.Event()
        self._is_waiting = True
        work.get_future().add_done_callback(lambda _: arrived.set())
        while not arrived.wait(_POLL_S):
            self._check()
        self._is_waiting = False
        try:
            work.wait()
        except RuntimeError as error:
            deadline = time.monotonic() + _LAST_WORDS_S
            while time.monotonic() < deadline:
                self._check()
                time.sleep(_POLL_S / 10)
            raise RuntimeError(
                f"another process of the pipeline ended without a word, or the connection to it broke: {error}"
            ) from error


def together(meeting: Meeting, work: Callable[[], T]) -> list[T]:
    """Do `work` in all processes, and return what it gave in each. What one raises, all raise."""
    mine: Exception | None = None
    result: Any = None
    try:
        result = work()
    except BlockFailed:
        raise
    except Exception as error:
        mine = error
    kind = None if mine is None else next((kind for kind in _SHARED_KINDS if isinstance(mine, kind)), RuntimeError)
    heard = meeting.hear((kind, str(mine), result))
    for rank, (kind, text, _) in enumerate(heard):
        if kind is not None:
            if mine is not None and rank == meeting.rank:
                raise meeting.refuse(mine)
            told = kind(f"process {rank}: {text}")
            told.__cause__ = mine
            raise meeting.refuse(told)
    return [value for _, _, value in heard]
