"""Rounds in which all processes of a run hear each other, and none is left waiting.

A problem of one process becomes everyone's error, raised at the same place in all of them; a process that fails
elsewhere, or dies, ends the wait of the others.
"""

import pickle
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.pipelining.failure import BlockFailed
from stretto.pipelining.groups import Group

T = TypeVar("T")
_POLL_S = 0.5
_PATIENCE_S = 30.0
_LAST_WORDS_S = 1.0
"""How long after a connection broke the news is awaited that says which process failed."""
_SHARED_KINDS = (FileNotFoundError, FileExistsError, TypeError, ValueError)
"""Errors that are raised as what they are in the processes where they did not arise."""


class Agreed(Exception):  # noqa: N818  (carries the error)
    """Carries an `error` that all processes raise at the same place, so that nobody has to be told."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Alone:
    """A run of one process."""

    rank = 0
    """Of this process; that of rank 0 does what one must do for all."""

    def hear(self, value: Any) -> list[Any]:
        """Its own `value`."""
        return [value]

    def refuse(self, error: Exception) -> Exception:
        """The error itself."""
        return error

    def close(self) -> None:
        """Nobody waits."""


class Starting:
    """The processes `ranks` (global), in order, before they have agreed on anything.

    They meet over torch's own `groups`, which reach all of them in turn, and whose waits end: one may have died
    before it came here.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], ranks: Sequence[int]) -> None:
        self._groups = groups
        self._ranks = ranks
        self.rank = ranks.index(dist.get_rank())

    def hear(self, value: Any) -> list[Any]:
        """The `value` of each process; it is pickled."""
        heard = {dist.get_rank(): value}
        for group in self._groups:
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, heard, group=group)
            heard = {rank: each for some in told for rank, each in some.items()}
        return [heard[rank] for rank in self._ranks]

    def refuse(self, error: Exception) -> Exception:
        """The error itself, as nobody waits for anything else."""
        return error


class Together:
    """A run of the processes of a group.

    `check()` is called while others are awaited; it raises what is known of a failure.
    """

    def __init__(self, group: Group, check: Callable[[], None]) -> None:
        self._group = group
        self._check = check
        self.rank = group.rank

    def close(self) -> None:
        """Leave the others: whoever waits for this process is told so by the end of the connection."""
        self._group.close()

    def hear(self, value: Any) -> list[Any]:
        """The `value` of each process, in order; it is pickled. Raises BlockFailed if a process failed."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes, gathering = self._group.all_gather(torch.tensor([own.numel()]))
        self._wait(gathering)
        heard = []
        for sender, size in enumerate(sizes):
            told = own if sender == self.rank else torch.empty(int(size), dtype=torch.uint8)
            self._wait(self._group.broadcast(told, sender))
            heard.append(pickle.loads(told.numpy().data))
        return heard

    def refuse(self, error: Exception) -> Exception:
        """What to raise for an `error` that all raise: an `Agreed` with it."""
        return Agreed(error)

    def _wait(self, work: Any) -> None:
        arrived = threading.Event()
        self._group.is_waiting = True
        work.get_future().add_done_callback(lambda _: arrived.set())
        began = time.monotonic()
        is_told = False
        while not arrived.wait(_POLL_S):
            self._check()
            if not is_told and time.monotonic() - began > _PATIENCE_S:
                is_told = True
                warnings.warn(
                    f"process {self.rank} has waited {_PATIENCE_S:.0f} s for the others: save, load and "
                    "merged_weights must be called by all, not by one alone",
                    stacklevel=6,
                )
        self._group.is_waiting = False
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


Meeting = Alone | Together
"""All processes of a run."""


def together(meeting: Meeting | Starting, work: Callable[[], T]) -> list[T]:
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
