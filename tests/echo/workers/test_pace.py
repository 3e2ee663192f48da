"""The factor of "auto" from service times, on a clock of the test's own."""

import pytest

from stretto.echo.stats import Clock
from stretto.echo.workers import pace as pace_module
from stretto.echo.workers.board import Board, Count
from stretto.echo.workers.pace import Pace, is_due

BATCH = 10


class Run:
    """A run whose times are set: `read`, `finish` and `other` seconds an example, `step` seconds an update."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_workers: int, *, says_step: bool = True, **times: float
    ):
        self.now = 0.0
        monkeypatch.setattr(pace_module.time, "perf_counter", lambda: self.now)
        self.board, self.clock, self.num_workers, self.says_step = (
            Board(num_workers),
            Clock(),
            num_workers,
            says_step,
        )
        self.times = {"other": 0.0, "finish": 0.0, **times}
        self.pace = Pace(self.board, num_workers, 8, self.clock)
        self.num_updates = self.drawn = 0
        self.factor = 1.0

    def _draw_by_a_trainer(self, num_updates: int, work: float, step: float) -> None:
        """Draws as torch makes them: two batches a worker ahead, one more with each batch that is returned."""
        ahead = 2 * self.num_workers
        ready, returned = [0.0] * ahead, [0.0] * ahead
        for _ in range(num_updates):
            ready.append(max(returned[-ahead], ready[-self.num_workers]) + work)
            returned.append(max(returned[-1] + step, ready[-1]))
        ready, returned = ready[ahead:], returned[ahead:]
        first = self.drawn // self.num_workers
        end = self.now
        for number, at in enumerate(returned):
            for worker in range(self.num_workers):
                done = sum(time <= at for time in ready[worker :: self.num_workers])
                self.board.row(worker)[Count.BATCHES] = first + done
            self.now = end - returned[-1] + at
            self.pace.drew(self.drawn + number)
        self.drawn += num_updates

    def interval(self, num_updates: int = 100) -> float:
        """Go on for some updates at the present factor, then choose the next."""
        read, finish, other, step = (self.times[name] for name in ("read", "finish", "other", "step"))
        uses = num_updates * BATCH
        reads = round(uses / self.factor)
        row = self.board.row(0)
        row[Count.READS] += reads
        row[Count.READ_NS] += round(reads * read * 1e9)
        row[Count.USES] += uses
        row[Count.USE_NS] += round(uses * finish * 1e9)
        work = BATCH * (read / self.factor + finish + other) / max(1, self.num_workers)
        self.now += num_updates * (max(work, step) if self.num_workers else work + step)
        if self.says_step:
            self.clock.step_s += num_updates * step
        elif self.num_workers:
            self._draw_by_a_trainer(num_updates, BATCH * (read / self.factor + finish + other), step)
        self.num_updates += num_updates
        self.factor = self.pace.factor(self.factor, self.num_updates)
        return self.factor


@pytest.mark.parametrize(("read", "factor"), [(0.001, 1), (0.004, 2), (0.012, 6), (0.2, 8)])
def test_factor_is_r_within_its_bounds(monkeypatch: pytest.MonkeyPatch, read: float, factor: float) -> None:
    run = Run(monkeypatch, 2, read=read, step=0.01)
    assert run.interval() == pytest.approx(factor, rel=0.15)


def test_augmentation_takes_part_of_the_workers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 2, read=0.004, finish=0.001, step=0.01)
    assert run.interval() == pytest.approx(4)  # 10 * (0.004 / e + 0.001) / 2 = 0.01


def test_transport_is_learned_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 2, read=0.004, other=0.001, step=0.01)
    assert run.interval() == pytest.approx(4)
    assert run.interval() == pytest.approx(4)


def test_where_reading_is_nothing_the_factor_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 2, read=0.00001, finish=0.01, step=0.01)
    assert run.interval() == 1


def test_without_workers_the_factor_is_r(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 0, read=0.004, finish=0.0002, step=0.018)
    assert run.interval() == pytest.approx(2)  # 10 * 0.004 / (0.018 + 10 * 0.0002)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_that_nobody_times_is_found_out(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    run = Run(monkeypatch, num_workers, says_step=False, read=0.006, step=0.01)
    factors = [run.interval() for _ in range(8)]
    assert factors[-1] == pytest.approx(3 if num_workers else 6, rel=0.15)


def test_factor_follows_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 2, read=0.004, step=0.01)
    assert run.interval() == pytest.approx(2)
    run.times["read"] = 0.008
    assert run.interval() == pytest.approx(4, rel=0.05)
    run.times["read"] = 0.001
    assert run.interval() == 1


def test_a_run_resumed_right_before_a_choice_keeps_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 2, read=0.008, step=0.01)
    run.pace.restart(10)
    assert run.pace.factor(2.5, 10) == 2.5


def test_intervals_are_short_at_first() -> None:
    assert [number for number in range(401) if is_due(number)] == [10, 30, 100, 200, 300, 400]
