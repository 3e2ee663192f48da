"""The two neighbours of a block, and the boxes in which messages go to them and come from them."""

from collections.abc import Callable

from stretto.pipelining.block import Block
from stretto.pipelining.failure import BlockFailed, FailureBoard
from stretto.pipelining.groups import Group
from stretto.pipelining.place import Place
from stretto.pipelining.spec import Staleness
from stretto.pipelining.transport import Inbox, Outbox

_LAST_WORDS_S = 5.0
"""How long a process that fails or leaves early waits for its neighbours' threads to hear of it."""


class Neighbours:
    """The blocks before and behind one. Making it is collective, under a `name` that is new.

    A box is None where there is no neighbour.
    """

    def __init__(self, name: str, place: Place, spec: Staleness, block: Block, board: FailureBoard) -> None:
        self._ranks = place.ranks
        self._board = board
        self.to_next: Outbox | None = None
        self.to_last: Outbox | None = None
        self.from_last: Inbox | None = None
        self.from_next: Inbox | None = None
        k = place.index
        if place.num_stages > 1:
            # One for each direction: on gloo one communicator must not serve both.
            forward, back = (Group(f"{name}_{way}", place.ranks, block.device) for way in ("forward", "back"))
            under_way = [p + q + 1 for p, q in zip(spec.p, spec.q, strict=True)]
            if k + 1 < place.num_stages:
                self.to_next = Outbox(forward, k + 1, under_way[k], block.held, self._explain(k + 1))
                self.from_next = Inbox(back, k + 1, block.device, self._explain(k + 1), self.relay)
            if k > 0:
                self.to_last = Outbox(back, k - 1, under_way[k - 1], block.held, self._explain(k - 1))
                self.from_last = Inbox(forward, k - 1, block.device, self._explain(k - 1), self.relay)
        self._outboxes = [box for box in (self.to_next, self.to_last) if box is not None]
        self._inboxes = [box for box in (self.from_last, self.from_next) if box is not None]

    def open(self) -> None:
        """Begin to receive, and raise what has come from a neighbour that failed."""
        for inbox in self._inboxes:
            inbox.open()
            inbox.check()

    def check(self) -> None:
        """Raise what is known of a failure elsewhere."""
        for inbox in self._inboxes:
            inbox.check()
        if failure := self._board.read():
            raise failure

    def drain(self) -> None:
        """Wait until both have received everything."""
        for outbox in self._outboxes:
            outbox.drain()

    def relay(self, failure: BlockFailed) -> None:
        """Tell both of a failure, once."""
        for outbox in self._outboxes:
            outbox.say_goodbye(failure)

    def await_answers(self) -> None:
        """After `relay`: a neighbour answers, which shows that it has heard."""
        for inbox in self._inboxes:
            inbox.join(_LAST_WORDS_S)

    def _explain(self, peer: int) -> Callable[[BaseException], BlockFailed]:
        rank = self._ranks[peer]
        return lambda error: self._board.explain(error, rank)
