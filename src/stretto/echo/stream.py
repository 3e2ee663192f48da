"""The stream of fresh batches into the residents, across passes, and what is drawn from them."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from stretto.echo.buffer import BatchList, Bound, Buffer, TensorPool
from stretto.echo.factor import default_max_factor
from stretto.echo.lengths import updates_per_epoch
from stretto.echo.order import check_replayable
from stretto.echo.passes import PassEnd, Passes, Position
from stretto.echo.residents import Drawn, Residents
from stretto.echo.settings import Settings
from stretto.echo.stats import Clock, Counters
from stretto.echo.upstream import Failure, Fresh, Upstream
from stretto.state import to_plain


class Stream:
    """Admits fresh batches by the factor's rule and draws updates. One thread, the consumer's, calls it.

    `position` says what has been admitted: the pass, how many of its batches, and the loader's own state after
    the last of them. Batches that were fetched but not admitted are fetched again after a restart.
    """

    def __init__(self, loader: Any, settings: Settings, counters: Counters, clock: Clock) -> None:
        self._loader = loader
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._passes = Passes(loader, settings.seed)
        # A DataLoader yields new tensors and a list yields what stays; any other loader may fill one again.
        copies = settings.copy and not isinstance(loader, DataLoader | list | tuple)
        self.upstream = Upstream(self._passes, run_on=settings.carry_over, copies=copies)
        self.residents: Residents | None = None
        self.position = Position(0)
        self.has_begun = False
        self.pass_is_over = False
        """Of an epoch that is one pass: nothing more is admitted."""
        self.items_per_pass: int | None = None
        """Known once a pass is over."""
        self._items_in_pass = 0
        self._has_failed = False
        self.loader_has_failed = False
        """What was raised last is the loader's own error, not one of keeping its batches."""
        self._refused: list[Any] = []
        """The batch that could not be kept."""
        self._restored: dict[str, Any] | None = None

    def start(self) -> None:
        """Fetch in the background from the present position on."""
        if not self.has_begun or self._has_failed:
            if self.position.start_states is None:
                self.position.start_states = self._passes.start_states()
            self._seek()
            self.has_begun, self._has_failed = True, False
        if not self.pass_is_over:
            self.upstream.start()

    def take_over(self, iterator: Iterator[Any], position: Position) -> None:
        """Continue, before the first `start`, with an iterator that was begun outside and has come so far."""
        assert not self.has_begun
        self.position, self.has_begun = position, True
        self._passes.take_over(iterator, position)

    def give_up(self) -> tuple[Iterator[Any], Position]:
        """Stop fetching: the rest of what was being fetched, with what was not admitted, and where that begins."""
        pending = [*self._refused, *self.upstream.take_back()]
        iterator, position = self._passes.give_up()
        position.num_batches = max(0, position.num_batches - len(pending))
        return chain(pending, iterator or ()), position

    def draw(self) -> Drawn | None:
        """One update's batch; None at the end of an epoch that is one pass. Waits as the factor's rule says.

        Raises what the loader raised when the update needs the batch that failed.
        """
        if self._has_failed:
            self.start()
        residents = self.residents or self._make_residents()
        if residents is None:
            return None
        self._admit(residents)
        if not self.pass_is_over:
            drawn: Drawn | None = residents.draw()
        elif self._settings.carry_over:
            return None
        else:
            drawn = residents.drain(drop_last=getattr(self._loader, "drop_last", False))
        if drawn is None:
            self.drop_residents()
            return None
        self._counters.drew(drawn.draw)
        return drawn

    def abandon_pass(self) -> None:
        """An epoch was left early: without `carry_over` the rest of its pass is dropped."""
        if self._settings.carry_over:
            return
        if not self.pass_is_over and self.position.num_batches:
            self.upstream.stop(None)
            start_states = self._passes.start_states()
            self.position = Position(self.position.pass_index + 1, start_states=start_states)
            self._seek()
            self._items_in_pass = 0
        self.drop_residents()

    def drop_residents(self) -> None:
        """Forget what is resident, counting the uses that were due."""
        if self.residents is not None:
            self._counters.dropped_uses += self.residents.clear()

    def close(self) -> None:
        """Drop the residents and their memory."""
        self.drop_residents()
        self.residents = None

    def state_dict(self) -> dict[str, Any]:
        """The position, and the residents with or without their contents."""
        position = self.position
        if position.start_states is None:
            position = replace(position, start_states=self._passes.start_states())
        residents = self._restored
        if self.residents is not None:
            residents = self.residents.state_dict(with_buffer=self._settings.checkpoint_buffer)
        state = {
            "position": asdict(position),
            "has_begun": self.has_begun,
            "pass_is_over": self.pass_is_over,
            "items_per_pass": self.items_per_pass,
            "items_in_pass": self._items_in_pass,
        }
        return {**to_plain(state), "residents": residents}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. Raises ValueError if the loader's order cannot be made again."""
        if state["has_begun"]:
            check_replayable(self._loader)
        self.position = Position(**state["position"])
        self.upstream.seek(self.position)
        self.upstream.attach(None)
        self.has_begun = state["has_begun"]
        self.pass_is_over = state["pass_is_over"]
        self.items_per_pass = state["items_per_pass"]
        self._items_in_pass = state["items_in_pass"]
        self._has_failed = False
        self.residents, self._restored = None, state["residents"]

    def _admit(self, residents: Residents) -> None:
        """Admit what the rule asks for before an update."""
        is_auto = self._settings.factor == "auto"
        has_admitted = False
        while not self.pass_is_over:
            is_short = residents.is_short
            if not (is_short or (not has_admitted if is_auto else residents.asks())):
                return
            fresh = self._head(wait=is_short or not is_auto)
            if fresh is None:
                return
            fresh.prepared = prepared = fresh.prepared or residents.buffer.prepare(fresh.batch)
            if not residents.fits(prepared, evict=is_auto):
                return
            self._admit_head(residents, fresh)
            has_admitted = True

    def _admit_head(self, residents: Residents, fresh: Fresh) -> None:
        if (spare := self.upstream.pop()) is not None:
            residents.give_back(spare)
        assert fresh.prepared is not None
        num_items = fresh.prepared.num_items
        self._has_failed = True  # until it is resident: what raises here has to be fetched again
        residents.admit(fresh.prepared, fresh.slots, self.position.pass_index, self._items_in_pass)
        self._has_failed = False
        if (spare := residents.lend()) is not None:
            self.upstream.lend(spare)
        self._items_in_pass += num_items
        before = self.position
        self.position = Position(before.pass_index, before.num_batches + 1, fresh.loader_state, before.start_states)
        self._counters.fresh_batches += 1
        self._counters.fresh_items += num_items

    def _seek(self) -> None:
        """Fetch from `position` on; what is ready is thrown away."""
        for slots in self.upstream.seek(self.position):
            if self.residents is not None:
                self.residents.give_back(slots)

    def _head(self, *, wait: bool) -> Fresh | None:
        """The next fresh batch; None if there is none yet, or the pass is over and the epoch with it."""
        while True:
            item = self.upstream.head(wait=False)
            if item is None and wait:
                self._clock.drawn()
                item = self.upstream.head(wait=True)
                self._clock.waited()
            if item is None or isinstance(item, Fresh):
                return item
            self.upstream.pop()
            if isinstance(item, Failure):
                self._fail(item)
            self.position = item.next_start
            self.items_per_pass, self._items_in_pass = self._items_in_pass, 0
            if updates_per_epoch(self._loader, self._settings) is None:
                self.pass_is_over = True
                return None

    def _fail(self, failure: Failure) -> NoReturn:
        self._has_failed = True
        self.loader_has_failed = failure.is_of_loader
        self._refused = [] if failure.is_of_loader else [failure.batch]
        failure.surface()

    def _peek(self) -> Fresh:
        """The next fresh batch, whichever pass it is of; nothing is taken."""
        self._clock.drawn()
        self.upstream.start()
        item = self.upstream.head(wait=True)
        if isinstance(item, PassEnd):
            self.upstream.start()
            item = self.upstream.head(wait=True, at=1)
        self._clock.waited()
        if isinstance(item, Failure):
            self._fail(item)
        assert isinstance(item, Fresh)
        return item

    def _make_residents(self) -> Residents | None:
        """Make the buffer after the example of the first batch, and restore what a state held."""
        if self._restored is None:
            template = self._head(wait=True)
            if template is None:
                return None
        else:
            template = self._peek()
        settings = self._settings
        buffer: Buffer
        bound, device = Bound.parse(settings.buffer), settings.device
        assert device is None or isinstance(device, torch.device)
        if settings.unit == "batch":
            buffer = BatchList(template.batch, bound, device, copy=settings.copy)
        else:
            batch_size = self._restored["batch_size"] if self._restored else None
            buffer = TensorPool(template.batch, bound, device, batch_size)
        factor = None if settings.factor == "auto" else settings.factor
        max_factor = settings.max_factor or default_max_factor(buffer.batch_size)
        residents = Residents(buffer, factor, max_factor, settings.seed)
        if self._restored is not None:
            self._counters.dropped_uses += residents.load_state_dict(self._restored, template.batch)
            self._restored = None
        self.residents = residents
        self.upstream.attach(buffer)
        return residents
