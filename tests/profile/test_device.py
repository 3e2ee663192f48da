"""The stall that an accelerator sees, on a queue that stands in for its stream: no accelerator is needed here."""

import pytest
import torch

from stretto.profile.device import DeviceClock


class Queue:
    """Runs kernels one after the other; an event completes when what was queued before it is done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free_at = 0.0

    def run(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def record(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.time = max(queue.now, queue.free_at)

    def query(self) -> bool:
        return self.time <= self._queue.now

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.time - self.time)


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def clock(queue: Queue) -> DeviceClock:
    return DeviceClock(torch.device("cpu"), queue.record, lambda: None)


def wait(queue: Queue, clock: DeviceClock, seconds: float) -> list[tuple[float, float]]:
    begin, before = queue.now, clock.mark()
    queue.now += seconds
    return clock.measure(before, begin)


def test_a_wait_behind_queued_kernels_is_no_stall(queue: Queue, clock: DeviceClock) -> None:
    queue.run(5.0)
    assert wait(queue, clock, 3.0) == []  # the kernels still run: nothing is known yet
    queue.now = 10.0
    assert wait(queue, clock, 0.0) == [(0.0, 0.0), (10.0, 0.0)]


def test_the_part_of_a_wait_that_kernels_do_not_cover_is_the_stall(queue: Queue, clock: DeviceClock) -> None:
    queue.run(2.0)
    assert wait(queue, clock, 5.0) == [(0.0, pytest.approx(3.0))]


def test_a_wait_with_nothing_queued_is_all_stall(queue: Queue, clock: DeviceClock) -> None:
    assert wait(queue, clock, 4.0) == [(0.0, pytest.approx(4.0))]


def test_a_processor_has_no_such_clock() -> None:
    assert DeviceClock.of(torch.device("cpu")) is None


def test_a_transfer_is_timed_over_all_tensors_of_a_batch(clock: DeviceClock) -> None:
    assert clock.time_transfer({"x": torch.zeros(4), "names": ["a"], "y": [torch.ones(2)]}) >= 0
