"""Messages between neighbouring blocks, over one process group for each direction.

    block k's Outbox ── header, tensors ──> a thread of block k+1 that receives ── queue ──> its Inbox

A message is a header of fixed length (kind, batch, description, and tensors small enough to fit) and the larger
tensors, each on its own. Sends never block until more are under way than the staleness allows; the thread takes in
whatever comes, so a block is never kept from sending by one that computes.
"""

import contextlib
import enum
import pickle
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from stretto.pipelining.codec import TensorShape, decode, encode
from stretto.pipelining.failure import BlockFailed, failure_of
from stretto.pipelining.groups import Group

_HEADER_BYTES = 16384
_PREFIX = struct.Struct("<qqqq")
_INLINE_BYTES = 6144
"""Tensors up to this size (a generator's state has 5056) travel in the header: they cost less than a message."""


class Kind(enum.IntEnum):
    """What a message is."""

    DATA = 0
    """A batch, on its way forward."""
    GRADIENT = 1
    """The gradient of a block's output, on its way back."""
    EVAL = 2
    """A value to be evaluated."""
    END = 3
    """No further batch."""
    DONE = 4
    """The sender has trained on all batches."""
    FLUSH = 6
    """The sender finishes what is under way."""
    ERROR = 5
    """A process failed or left early; the value is its rank and traceback."""


@dataclass(slots=True)
class Message:
    """A message as it came."""

    kind: Kind
    n: int = -1
    value: Any = None
    ready: Any = None
    """An event on the accelerator after which the tensors are there, or None."""

    def settle(self) -> None:
        """Let what is queued on the accelerator from now on find the tensors there."""
        if self.ready is not None:
            torch.accelerator.current_stream().wait_event(self.ready)


@dataclass(slots=True)
class Outbox:
    """Sends to one neighbour. At most `limit` messages are under way after a `send`."""

    group: Group
    peer: int
    """The neighbour's rank in `group`."""
    limit: int
    held: Callable[[], Iterable[torch.Tensor]]
    """Gives the tensors that change in place, so that what shares their memory is copied first; in `send` alone."""
    explain: Callable[[BaseException], BlockFailed]
    """Finds what broke a connection."""
    _under_way: deque[tuple[list[dist.Work], list[torch.Tensor]]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _goodbye: BlockFailed | None = None

    def send(self, kind: Kind, n: int = -1, value: Any = None, *, last: bool = False) -> None:
        """Send a message. After one that is `last` the neighbour's thread stops until it is asked again.

        Raises BlockFailed if the connection is broken, or the neighbour was told of a failure: it takes in no more.
        """
        with self._lock:
            if self._goodbye is not None:
                raise self._goodbye
            try:
                self._send(kind, n, value, last, self.held())
            except ConnectionError as error:
                raise self.explain(error) from error
        self.drain(self.limit)

    def say_goodbye(self, failure: BlockFailed) -> None:
        """Send an ERROR, once, whatever else is under way; never raises. Any thread may call it.

        It is without tensors: asking for those that are held is the training thread's alone, as a gradient that it
        drops meanwhile would be read after its end.
        """
        with self._lock:
            if self._goodbye is not None:
                return
            self._goodbye = failure
            try:
                self._send(Kind.ERROR, -1, (failure.rank, failure.traceback), True, ())
            except ConnectionError:  # the neighbour is gone
                return

    def drain(self, limit: int = 0) -> None:
        """Wait until the neighbour has received all but `limit` messages. Raises BlockFailed if it is gone."""
        while len(self._under_way) > limit:
            works, _ = self._under_way[0]
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self.explain(error) from error
            self._under_way.popleft()

    def _send(self, kind: Kind, n: int, value: Any, last: bool, held: Iterable[torch.Tensor]) -> None:
        description, flat = encode(value, held)
        inline = [_to_bytes(tensor) for tensor in flat]
        body = pickle.dumps((description, inline), protocol=pickle.HIGHEST_PROTOCOL)
        header = bytearray(_HEADER_BYTES)
        _PREFIX.pack_into(header, 0, kind, n, last, len(body))
        fits = len(body) <= _HEADER_BYTES - _PREFIX.size
        if fits:
            header[_PREFIX.size : _PREFIX.size + len(body)] = body
        parts = [torch.frombuffer(header, dtype=torch.uint8)]
        if not fits:
            parts.append(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        parts += [tensor.view(torch.uint8) for tensor, sent in zip(flat, inline, strict=True) if sent is None]
        works: list[dist.Work] = []
        try:
            self.group.send(parts, self.peer, works)
        finally:  # kept while it is under way, also after Ctrl-C; not before, as another thread may wait for all
            self._under_way.append((works, parts))


class Inbox:
    """Receives from one neighbour in a thread of its own, which lives while something may come.

    When the neighbour fails, leaves, or its connection breaks, `on_failure(failure)` is called in that thread, and
    `get` and `peek` raise the failure.
    """

    def __init__(
        self,
        group: Group,
        peer: int,
        device: torch.device,
        explain: Callable[[BaseException], BlockFailed],
        on_failure: Callable[[BlockFailed], None],
    ) -> None:
        self._group = group
        self._peer = peer
        self._device = device
        self._explain = explain
        self._on_failure = on_failure
        self._arrived: queue.SimpleQueue[Message | BlockFailed] = queue.SimpleQueue()
        self._read: deque[Message] = deque()
        self._failure: BlockFailed | None = None
        self._thread: threading.Thread | None = None
        self._is_receiving = False
        self._lock = threading.Lock()
        """So that a thread that has put its last message is never taken for one that still receives."""

    def open(self) -> None:
        """Begin to receive, unless it has begun or something has come that nobody has read."""
        with self._lock:
            if self._failure is None and not self._is_receiving and self._arrived.empty():
                self._is_receiving = True
                self._thread = threading.Thread(target=self._receive, daemon=True, name="stretto pipeline inbox")
                self._thread.start()

    def put_back(self, messages: Iterable[Message]) -> None:
        """Let `messages` be the next that `get` returns."""
        self._read.extendleft(reversed(list(messages)))

    def read_ahead(self, count: int) -> list[Message]:
        """Wait until `count` messages have come, and show them; `get` still returns them."""
        while len(self._read) < count:
            self._read.append(self._next())
        shown = list(self._read)[:count]
        for message in shown:
            message.settle()
        return shown

    def peek(self) -> Message:
        """The next message, which stays the next."""
        return self.read_ahead(1)[0]

    def get(self, kind: Kind) -> Message:
        """The next message. Raises RuntimeError if it is of another kind, BlockFailed if the neighbour failed."""
        found = self._read.popleft() if self._read else self._next()
        if found.kind != kind:
            raise RuntimeError(
                f"expected {kind.name} from the neighbouring block, found {found.kind.name} (batch {found.n}): "
                "all ranks must run the same loop of feed, step, eval and flush"
            )
        found.settle()
        return found

    def check(self) -> None:
        """Raise BlockFailed if a failure has come, without waiting."""
        while not self._arrived.empty():
            self._read.append(self._next())
        if self._failure is not None:
            raise self._failure

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _next(self) -> Message:
        if self._failure is not None:
            raise self._failure
        self.open()
        found = self._arrived.get()
        if isinstance(found, BlockFailed):
            self._failure = found
            raise found
        return found

    def _receive(self) -> None:
        try:
            if self._device.type != "cpu":
                torch.accelerator.set_device_index(self._device)
            while self._is_receiving:
                message, last = self._receive_one()
                message.value = message.value()
                if message.kind is Kind.ERROR:
                    raise BlockFailed(*message.value)
                with self._lock:
                    self._is_receiving = not last
                    self._arrived.put(message)
        except Exception as error:
            is_elsewhere = isinstance(error, ConnectionError | BlockFailed)
            failure = self._explain(error) if is_elsewhere else failure_of(error, self._group.own_rank)
            self._on_failure(failure)
            self._arrived.put(failure)
            if not is_elsewhere:
                self._discard()

    def _discard(self) -> None:
        """Take in what still comes, for a neighbour that waits until it is received, until that answers or goes."""
        with contextlib.suppress(Exception):
            while self._receive_one()[0].kind is not Kind.ERROR:
                pass

    def _receive_one(self) -> tuple[Message, bool]:
        """A message with a function that makes its value: all of it has come by then, so the next can follow."""
        header = self._receive_bytes(_HEADER_BYTES)
        data = header.numpy().data
        kind, n, last, body_bytes = _PREFIX.unpack_from(data)
        if body_bytes <= _HEADER_BYTES - _PREFIX.size:
            body = data[_PREFIX.size : _PREFIX.size + body_bytes]
        else:
            body = self._receive_bytes(body_bytes).numpy().data
        description, inline = pickle.loads(body)
        flat = [
            self._receive_tensor(shape) if sent is None else _from_bytes(sent, shape.dtype)
            for shape, sent in zip(description.shapes, inline, strict=True)
        ]
        ready = None
        if any(not tensor.is_cpu for tensor in flat):
            ready = torch.accelerator.current_stream().record_event()
        return Message(Kind(kind), n, partial(decode, description, flat), ready), bool(last)

    def _receive_bytes(self, count: int) -> torch.Tensor:
        received = torch.empty(count, dtype=torch.uint8)
        self._group.receive(received, self._peer)
        return received

    def _receive_tensor(self, shape: TensorShape) -> torch.Tensor:
        device = torch.device("cpu") if shape.is_cpu else self._device
        received = torch.empty(shape.num_elements, dtype=shape.dtype, device=device)
        self._group.receive(received.view(torch.uint8), self._peer)
        return received


def _to_bytes(flat: torch.Tensor) -> bytes | None:
    """The bytes of a tensor that travels in the header, else None."""
    if flat.is_cpu and flat.nbytes <= _INLINE_BYTES:
        return flat.view(torch.uint8).numpy().tobytes()
    return None


def _from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
