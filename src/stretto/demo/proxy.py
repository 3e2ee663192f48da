"""The process behind `Link`: a TCP proxy with a cloud's latency and a rate per connection.

    client --bytes--> Pipe(delay)              --> server        one pair of pipes per connection
    client <--------- Pipe(delay, rate)    <-- bytes server
    parent --one JSON object a line--> stdin; stdout --one JSON object a line--> parent

Each piece is stamped when it arrives. A chunk of n bytes starts when the one before it is through, or when it
arrived, is through n / rate later, and is delivered `delay` after that: one timer per chunk, no task switch, and
a late timer costs no rate, since the times follow from the stamps and not from the clock.
Run by path, with the standard library only. It ends when its parent does.
"""

import asyncio
import json
import os
import sys
from collections import deque
from typing import Any, cast

_CHUNK_S = 0.02
_CHUNK_BYTES = (256, 256 * 1024)
_BACKLOG_BYTES = 256 * 1024
_UNCAPPED_BACKLOG_BYTES = 8 * 1024 * 1024
# How late a chunk may be (a busy machine) and still be made up for: the largest burst is this much of the rate.
_CREDIT_S = 0.05
_PARENT_POLL_S = 0.5


class Pipe(asyncio.Protocol):
    """One direction of one connection: takes from its own transport, gives to that of its twin."""

    twin: "Pipe"

    def __init__(self, proxy: "Proxy", *, capped: bool) -> None:
        self.proxy = proxy
        self.capped = capped
        self.transport: asyncio.Transport | None = None
        self.backlog: deque[tuple[float, memoryview]] = deque()
        self.backlog_bytes = 0
        self.free_at = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.blocked = False
        self.ended_at: float | None = None
        self.lost = False
        self.finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self.transport = cast(asyncio.Transport, transport)
        self.proxy.pipes.add(self)
        self.twin.schedule()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        assert self.transport is not None
        if self.twin.lost:
            return
        self.backlog.append((self.proxy.loop.time(), memoryview(data)))
        self.backlog_bytes += len(data)
        if self.backlog_bytes > self.limit_bytes():
            self.transport.pause_reading()
        self.schedule()

    def eof_received(self) -> bool:  # noqa: D102
        self.ended_at = self.proxy.loop.time()
        self.schedule()
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, D102
        self.lost = True
        self.finished = False
        self.ended_at = self.proxy.loop.time()
        self.proxy.pipes.discard(self)
        # Nobody is there any more to take what the twin still holds.
        self.twin.stop()
        self.twin.backlog.clear()
        self.schedule()

    def pause_writing(self) -> None:  # noqa: D102
        self.twin.blocked = True
        self.twin.stop()

    def resume_writing(self) -> None:  # noqa: D102
        self.twin.blocked = False
        self.twin.schedule()

    def limit_bytes(self) -> int:
        """Return the bytes to hold before the sender is made to wait: what is in flight, and some."""
        if self.rate is None:
            return _UNCAPPED_BACKLOG_BYTES
        in_flight_bytes = int(self.rate * self.proxy.delay_s)
        # Four times, since the sender goes on at half of it and both halves must cover a chunk and the delay.
        return max(_BACKLOG_BYTES, 4 * (in_flight_bytes + self.chunk_bytes()))

    def chunk_bytes(self) -> int:
        """Return the bytes to deliver at once: 20 ms of the rate, within bounds."""
        low, high = _CHUNK_BYTES
        return high if self.rate is None else max(low, min(high, int(self.rate * _CHUNK_S)))

    @property
    def rate(self) -> float | None:
        """Bytes per second, or None without a cap."""
        return self.proxy.rate if self.capped else None

    def stop(self) -> None:
        """Forget the planned delivery."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def schedule(self) -> None:
        """Plan the next delivery, unless one is planned or none is allowed."""
        proxy = self.proxy
        blocked = self.blocked or proxy.paused or self.twin.transport is None or self.twin.lost
        if blocked or self.timer is not None:
            return
        earliest = proxy.loop.time() - proxy.delay_s - _CREDIT_S
        if self.backlog:
            arrived_at, data = self.backlog[0]
            start = max(self.free_at, arrived_at, earliest)
            size, done_at = len(data), start
            if self.rate is not None:
                size = min(size, self.chunk_bytes())
                done_at = start + size / self.rate
            self.timer = proxy.loop.call_at(done_at + proxy.delay_s, self.deliver, size, done_at)
        elif self.ended_at is not None and not self.finished:
            self.timer = proxy.loop.call_at(max(self.free_at, self.ended_at) + proxy.delay_s, self.finish)

    def deliver(self, size: int, done_at: float) -> None:
        """Hand over the first `size` bytes."""
        self.timer = None
        destination = self.twin.transport
        assert destination is not None
        self.free_at = done_at
        arrived_at, data = self.backlog.popleft()
        if size < len(data):
            self.backlog.appendleft((arrived_at, data[size:]))
        self.backlog_bytes -= size
        if self.capped and self.proxy.cut_bytes is not None:
            if size >= self.proxy.cut_bytes:
                destination.write(data[: self.proxy.cut_bytes])
                self.proxy.cut_bytes = None
                destination.abort()
                return
            self.proxy.cut_bytes -= size
        destination.write(data[:size])
        if self.capped:
            self.proxy.sent_bytes += size
        if self.transport is not None and not self.lost and self.backlog_bytes <= self.limit_bytes() // 2:
            self.transport.resume_reading()
        self.schedule()

    def finish(self) -> None:
        """Pass on that the sender has ended."""
        self.timer = None
        self.finished = True
        destination = self.twin.transport
        assert destination is not None
        if self.lost:
            destination.close()
        elif destination.can_write_eof():
            destination.write_eof()


class Proxy:
    """All connections and the settings they share."""

    def __init__(self, host: str, port: int, delay_s: float, rate: float | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.host, self.port = host, port
        self.delay_s = delay_s
        self.rate = rate
        self.paused = False
        self.cut_bytes: int | None = None
        self.sent_bytes = self.connections = 0
        self.pipes: set[Pipe] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self) -> Pipe:
        """Make the pipes for a new client and return the client's."""
        self.connections += 1
        up, down = Pipe(self, capped=False), Pipe(self, capped=True)
        up.twin, down.twin = down, up
        # The handshake of the client was local; over the real distance it takes a round trip.
        up.free_at = self.loop.time() + 2 * self.delay_s
        task = self.loop.create_task(self.connect(up, down))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return up

    async def connect(self, up: Pipe, down: Pipe) -> None:
        """Connect to the server, or drop the client."""
        try:
            await self.loop.create_connection(lambda: down, self.host, self.port)
        except OSError:
            if up.transport is not None:
                up.transport.abort()
            return
        if up.lost:
            down.schedule()
            up.schedule()

    def apply(self, command: dict[str, Any]) -> dict[str, Any]:
        """Put one command in force and return the counts."""
        if "rate" in command:
            self.rate = command["rate"]
        if "paused" in command:
            self.paused = command["paused"]
        if "cut_bytes" in command:
            self.cut_bytes = command["cut_bytes"]
        for pipe in tuple(self.pipes):
            pipe.stop()
            if command.get("paused") is False:
                pipe.free_at = max(pipe.free_at, self.loop.time())
            pipe.schedule()
        return {"connections": self.connections, "sent_bytes": self.sent_bytes}


async def _serve(host: str, port: int, delay_s: float, rate: float | None, parent_pid: int) -> None:
    loop = asyncio.get_running_loop()
    proxy = Proxy(host, port, delay_s, rate)
    server = await loop.create_server(proxy.accept, "127.0.0.1", 0)
    ended = asyncio.Event()
    partial = b""

    def reply(message: dict[str, Any]) -> None:
        os.write(1, json.dumps(message).encode() + b"\n")

    def on_command() -> None:
        nonlocal partial
        data = os.read(0, 65536)
        if not data:
            loop.remove_reader(0)
            ended.set()
            return
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            reply(proxy.apply(json.loads(line)))

    loop.add_reader(0, on_command)
    reply({"port": server.sockets[0].getsockname()[1]})
    while os.getppid() == parent_pid and not ended.is_set():
        # The pipe alone is not enough: forked workers of the parent hold its end too.
        try:
            await asyncio.wait_for(ended.wait(), _PARENT_POLL_S)
        except TimeoutError:
            continue


if __name__ == "__main__":
    _options = json.loads(sys.argv[1])
    asyncio.run(_serve(**_options))
