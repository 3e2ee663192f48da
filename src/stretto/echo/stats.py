"""What an EchoLoader has done: both clocks, where the time went, duplicates and lag."""

import time
from dataclasses import dataclass, field

from stretto.echo.plan import Draw


@dataclass(frozen=True, kw_only=True, slots=True)
class EchoStats:
    """Counts and times since the EchoLoader was made; times of this process only, counts restored with a state."""

    passes: int
    """Pass of the wrapped loader that the latest admitted batch belongs to, from 0."""
    epochs: int
    """Epochs finished."""
    updates: int
    """Batches handed out: the first clock."""
    fresh_batches: int
    """Batches admitted from the wrapped loader."""
    fresh_items: int
    """Examples (batches with unit="batch") admitted: the second clock."""
    uses: int
    """Examples (batches) handed out."""
    duplicates: int
    """Uses of an example that was already in the same batch: only in a drain, see `carry_over`."""
    dropped_uses: int
    """Uses that were due but did not happen: residents left at `close`, after an abandoned pass, with
    `drop_last`, or not saved in a state. Under "auto" an item is due one use."""
    resident_items: int
    """Examples (batches) in the buffer now."""
    buffer_bytes: int
    """Bytes of the buffer: the pool's memory, or the sum over the batches in the list."""
    mean_lag_updates: float
    """Updates between an item's admission and its use, averaged over all uses."""
    wait_s: float
    """Seconds that updates waited for the wrapped loader."""
    first_wait_s: float
    """The part of `wait_s` before the first batch."""
    draw_s: float
    """Seconds spent on drawing, copying and `augment`."""
    step_s: float
    """Seconds between handing a batch out and being asked for the next one."""
    echo_gap: float | None = None
    """How far the losses of later uses lie below those of first uses, in parts of the latter (of their size, if
    they are negative): 0.1 is 10 % lower. Over the latest 400 observed updates; None where nothing was observed,
    before 5 updates with first uses can be compared, and if the losses are zero. See `EchoLoader.observe`."""
    reads: int = 0
    """Examples that worker processes read, ahead of the updates (EchoDataLoader)."""
    reread: int = 0
    """The part of `reads` that had been read before: after an early end, a resume or a lost worker."""
    skipped: int = 0
    """Examples left out because they raised (`on_error="skip"`)."""
    dropped_items: int = 0
    """Examples of this rank that were not used, so that all ranks make equally many updates."""

    @property
    def factor(self) -> float:
        """The realised echoing factor: uses per fresh item so far."""
        return self.uses / self.fresh_items if self.fresh_items else 0.0

    @property
    def total_s(self) -> float:
        """Seconds inside iterations."""
        return self.wait_s + self.draw_s + self.step_s

    @property
    def au_percent(self) -> float:
        """Accelerator utilisation as MLPerf Storage defines it: time in update steps / total time, in percent."""
        return 100 * self.step_s / self.total_s if self.total_s else 0.0

    @property
    def stall_percent(self) -> float:
        """Time waited for the wrapped loader / total time, in percent."""
        return 100 * self.wait_s / self.total_s if self.total_s else 0.0


@dataclass(slots=True)
class Counters:
    """The running counts behind `EchoStats`; the integers are part of a state."""

    epochs: int = 0
    updates: int = 0
    fresh_batches: int = 0
    fresh_items: int = 0
    uses: int = 0
    duplicates: int = 0
    dropped_uses: int = 0
    sum_lag: int = 0
    dropped_items: int = 0

    def drew(self, draw: Draw) -> None:
        """Count one update."""
        self.updates += 1
        self.uses += len(draw.slots)
        self.duplicates += draw.num_duplicates
        self.sum_lag += draw.sum_lag

    def load(self, state: dict[str, int]) -> None:
        """Take over saved counts."""
        for name, count in state.items():
            setattr(self, name, count)


@dataclass(slots=True)
class Clock:
    """Splits the consumer's time into wait, draw and step, in seconds."""

    wait_s: float = 0.0
    first_wait_s: float = 0.0
    draw_s: float = 0.0
    step_s: float = 0.0
    _mark: float | None = field(default=None)

    def asked(self) -> None:
        """The consumer asks for a batch: what lies behind was its step."""
        now = time.perf_counter()
        if self._mark is not None:
            self.step_s += now - self._mark
        self._mark = now

    def waited(self) -> None:
        """A wait for the wrapped loader is over."""
        now = time.perf_counter()
        assert self._mark is not None
        self.wait_s += now - self._mark
        if not self.step_s:
            self.first_wait_s = self.wait_s
        self._mark = now

    def drawn(self) -> None:
        """A batch is about to be handed out."""
        now = time.perf_counter()
        assert self._mark is not None
        self.draw_s += now - self._mark
        self._mark = now

    def ended(self) -> None:
        """The iteration is over: what follows is not part of a step."""
        self._mark = None
