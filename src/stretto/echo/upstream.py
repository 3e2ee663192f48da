"""The background thread that keeps the next fresh batches ready while the accelerator works.

    Passes -> [fetch] -> ready: at most 4 (prepared; the first copied into slots lent by the consumer) -> consumer

The thread runs only while it is wanted: it ends after the fetch in hand when an iteration is over, and the next
one continues with the same open iterator. It holds no reference to the EchoLoader, so that one which is
forgotten can be collected, which ends the thread.
"""

import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

from stretto.echo.buffer import Buffer, Prepared
from stretto.echo.passes import PassEnd, Passes, Position
from stretto.echo.plan import IntArray
from stretto.tree import clone

THREAD_NAME = "stretto-upstream"
_LOG = logging.getLogger(__name__)

# The thread fills up to _DEPTH and is woken at _LOW: a wake costs 0.1 ms where both sides hold the GIL.
_DEPTH = 4
_LOW = 2


@dataclass(slots=True)
class Fresh:
    """A batch from the loader, with the loader's own state after it."""

    batch: Any
    loader_state: Any
    prepared: Prepared | None = None
    slots: IntArray | None = None
    """Where the batch already is in the buffer."""


@dataclass(slots=True)
class Failure:
    """What the loader raised, or the buffer on one of its batches."""

    error: BaseException | None
    batch: Any = None
    """The batch that the buffer cannot keep."""
    is_of_loader: bool = True

    def surface(self) -> NoReturn:
        """Raise it, once. No frame of its traceback keeps it: only the garbage collector would free the loader."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            del error


Item = Fresh | PassEnd | Failure


class Upstream:
    """Fetches ahead of one consumer. All methods are called by the consumer.

    Args:
        passes: where batches come from.
        run_on: whether the next pass begins right after a pass's end, or only at the next `start`.
        copies: whether to copy each batch before the next one is asked for, as the loader may fill it anew.
    """

    def __init__(self, passes: Passes, *, run_on: bool, copies: bool) -> None:
        self._passes = passes
        self._run_on = run_on
        self._copies = copies
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ready: deque[Item] = deque()
        self._thread: threading.Thread | None = None
        self._wanted = False
        self._is_closed = False
        self._buffer: Buffer | None = None
        self._spare: IntArray | None = None
        self._staging: Fresh | None = None

    def start(self) -> None:
        """Fetch until told otherwise."""
        with self._changed:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
                self._thread.start()

    def stop(self, timeout_s: float | None = 0.0) -> bool:
        """Let the thread end after the fetch in hand; wait for it up to `timeout_s` (None: as long as it takes).

        Returns whether it has ended. Nothing fetched is lost: `start` goes on.
        """
        if self._pid != os.getpid():  # forked, without the thread, but perhaps with the lock that it held
            return True
        with self._changed:
            self._wanted = False
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def seek(self, position: Position) -> list[IntArray]:
        """Throw away what is ready and continue at `position`. Returns the slots that were lent."""
        self.stop(None)
        lent = [item.slots for item in self._ready if isinstance(item, Fresh)] + [self._spare]
        self._ready.clear()
        self._spare = None
        self._passes.seek(position)
        return [slots for slots in lent if slots is not None]

    def attach(self, buffer: Buffer | None) -> None:
        """Prepare batches for `buffer` from now on."""
        with self._changed:
            self._buffer = buffer

    def head(self, *, wait: bool, at: int = 0) -> Item | None:
        """The next item, or the `at`-th behind it, left where it is; None when not there yet and not waited for.

        Raises RuntimeError where another thread closes this one meanwhile.
        """
        with self._changed:
            while len(self._ready) <= at and wait:
                if self._is_closed:
                    raise RuntimeError("this iterator is over: its EchoLoader is closed")
                self.start()  # it may have been stopped for an iterator that another thread collected just now
                self._changed.wait()
            return self._ready[at] if len(self._ready) > at else None

    def pop(self) -> IntArray | None:
        """Remove the item that `head` returned, once the thread has finished with it.

        Returns the lent slots if it is a batch that does not use them.
        """
        with self._changed:
            while self._staging is not None and self._staging is self._ready[0]:
                self._changed.wait()
            item, spare = self._ready.popleft(), None
            if isinstance(item, Fresh) and item.slots is None:
                spare, self._spare = self._spare, None
            if len(self._ready) <= _LOW:
                self._changed.notify_all()
            return spare

    def take_back(self) -> list[Any]:
        """Stop, and return the batches that were fetched but not admitted, in order."""
        self.stop(None)
        batches = []
        for item in self._ready:
            if isinstance(item, Fresh):
                batches.append(item.batch if item.slots is None else self._staged(item))
            elif isinstance(item, Failure) and not item.is_of_loader:
                batches.append(item.batch)
        self._ready.clear()
        return batches

    def _staged(self, item: Fresh) -> Any:
        assert self._buffer is not None
        assert item.prepared is not None
        assert item.slots is not None
        return self._buffer.take(item.slots[: item.prepared.num_items])

    def lend(self, slots: IntArray) -> None:
        """Let the thread copy the next batch into `slots`, free ones of the buffer."""
        with self._changed:
            assert self._spare is None
            self._spare = slots
            self._changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and drop the open iterator; after `timeout_s` the thread does so when its fetch ends."""
        self._is_closed = True
        if self.stop(timeout_s):
            self._clear()
        else:
            _LOG.warning("the loader has not yielded for %g s: the thread ends when it does", timeout_s)

    def _clear(self) -> None:
        self._ready.clear()
        self._passes.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._wanted and len(self._ready) >= _DEPTH and not self._can_stage():
                    self._changed.wait()
                if not self._wanted:
                    self._thread = None
                    if self._is_closed:
                        self._clear()
                    self._changed.notify_all()
                    return
                item = self._take_to_stage()
            if item is not None:
                self._stage(*item)
                continue
            fetched = self._fetch()
            with self._changed:
                self._ready.append(fetched)
                over = isinstance(fetched, Failure) or (isinstance(fetched, PassEnd) and not self._run_on)
                if over:
                    self._thread = None
                self._changed.notify_all()
                if over:
                    return

    def _can_stage(self) -> bool:
        head = self._ready[0] if self._ready else None
        return (
            isinstance(head, Fresh)
            and head.slots is None
            and head.prepared is not None
            and self._spare is not None
            and head.prepared.num_items <= len(self._spare)
        )

    def _take_to_stage(self) -> tuple[Fresh, IntArray] | None:
        if not self._can_stage():
            return None
        head, spare = self._ready[0], self._spare
        assert isinstance(head, Fresh)
        assert spare is not None
        self._staging, self._spare = head, None
        return head, spare

    def _stage(self, item: Fresh, slots: IntArray) -> None:
        assert self._buffer is not None
        assert item.prepared is not None
        failure: Failure | None = None
        try:
            self._buffer.put(slots[: item.prepared.num_items], item.prepared)
        except BaseException as error:
            failure = Failure(error, item.batch, is_of_loader=False)
        with self._changed:
            if failure is None:
                item.slots, item.batch, item.prepared.content = slots, None, None
            else:
                self._ready[0], self._spare = failure, slots
            self._staging = None
            self._changed.notify_all()

    def _fetch(self) -> Item:
        try:
            fetched = self._passes.next()
            if isinstance(fetched, PassEnd):
                return fetched
            fresh = Fresh(*fetched)
        except StopIteration as stray:  # raised on as it is, it would look like the end of the epoch
            return Failure(_as_runtime_error(stray))
        except BaseException as error:  # every one of them belongs to the consumer
            return Failure(error)
        try:
            if self._copies:
                fresh.batch = clone(fresh.batch)
            if self._buffer is not None:
                fresh.prepared = self._buffer.prepare(fresh.batch)
        except StopIteration as stray:
            return Failure(_as_runtime_error(stray), fresh.batch, is_of_loader=False)
        except Exception as error:
            return Failure(error, fresh.batch, is_of_loader=False)
        return fresh


def _as_runtime_error(stray: StopIteration) -> RuntimeError:
    error = RuntimeError("the loader raised StopIteration outside of its iterator's __next__")
    error.__cause__ = stray
    return error
