"""A split model over K processes, one block in each, none waiting for more than its staleness asks.

    for x, y in schedule.feed(loader):       block 0 reads the loader, the others follow its batches
        schedule.step(x, target=y)           forward of batch n, backward of batch n - m_k, update
    schedule.flush()                         the last m_k backwards: as many updates as batches, on every block

All ranks run the same lines. What is computed is what `simulate` computes in one process, bit for bit: staleness is
fixed by m, never by timing.
"""

import atexit
import itertools
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from stretto.pipelining.block import Batch, Block, Gradients, enter, pair_of
from stretto.pipelining.block_state import weights_of
from stretto.pipelining.checkpoint import Checkpointed
from stretto.pipelining.checks import advise_nesterov
from stretto.pipelining.failure import BlockFailed, FailureBoard, failure_of
from stretto.pipelining.groups import Group, world_store
from stretto.pipelining.meeting import Agreed, Alone, Meeting, Together, together
from stretto.pipelining.neighbours import Neighbours
from stretto.pipelining.options import Autocast, Clip, LossFn, Options
from stretto.pipelining.place import Claim, Place, Stage, agree, all_processes, find_place
from stretto.pipelining.repairs import Repairs
from stretto.pipelining.replicas import Replicas
from stretto.pipelining.rng import batch_rng
from stretto.pipelining.spec import BackwardParams, PerBlock, Staleness
from stretto.pipelining.transport import Kind, Message

_instances = itertools.count()


class ScheduleDSP(Checkpointed):
    """Trains one block of a split model, in step with the processes that train the others.

    - `stage`: torch's `PipelineStage`, or (module, index, num_stages). Stage k is on rank k of the pipeline.
    - `optimizer`: of the block's own parameters; None for a block without. `lr_scheduler` is stepped here, once
      after each update: update u uses lr(u) on every block, however late it comes.
    - `loss_fn(output, target)`, on the last block; None: the model's output is the loss.
    - `p`, `m`, `backward_params`: the staleness, see `Staleness.of`. "stashed" keeps the forward's graph and its
      weights.
    - `accumulate`: micro-batches an update. A step is one micro-batch; the loss is divided by it.
    - `clip`: largest norm of the gradient of this block alone, or a function of its parameters.
    - `autocast`: torch.bfloat16, or a torch.autocast, entered around each forward, recompute and loss.
    - `repairs`: what makes stale training more accurate, see `Repairs`.
    - `group`: the processes of the pipeline (default: all). `mesh`: K x replicas, which begin with the weights of
      the first and average their gradients.
    - `seed`: of the random numbers of each batch, see `batch_rng`. Replica r of R draws those of batch n * R + r.

    Method: Algorithm 1 of arXiv 1909.02625. Making one is collective. Raises ValueError in all processes if one of
    them was given something impossible, or if they were given different settings.
    """

    block: Block
    _place: Place
    _options: Options

    def __init__(
        self,
        stage: Stage,
        optimizer: Optimizer | None,
        loss_fn: LossFn | None = None,
        *,
        p: PerBlock | None = None,
        m: PerBlock | Staleness | str | None = None,
        backward_params: BackwardParams | None = None,
        accumulate: int = 1,
        lr_scheduler: Any = None,
        clip: Clip | None = None,
        autocast: Autocast | None = None,
        repairs: Repairs | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
    ) -> None:
        starting, everyone = all_processes(stage, group, mesh)
        self._rank = dist.get_rank() if dist.is_initialized() else 0

        def start() -> Claim:
            self._place = find_place(stage, group, mesh, everyone)
            self._options = Options(
                spec=Staleness.of(self._place.num_stages, p, m, backward_params),
                loss_fn=loss_fn,
                accumulate=accumulate,
                clip=clip,
                autocast=autocast,
                repairs=repairs or Repairs(),
                seed=seed,
            )
            module, index = self._place.module, self._place.index
            self.block = Block(module, index, optimizer, lr_scheduler, self._options, self._average)
            return Claim(
                place=(self._place.ranks, index),
                settings=self._options.shared(),
                keys=list(weights_of(self.block)),
                name=f"stretto_{self._rank}_{next(_instances)}",
            )

        claims = together(starting, start)
        name = agree(claims, claims[starting.rank])
        self.spec = self._options.spec
        self.num_batches = 0
        self._failure: BlockFailed | None = None
        self._stream_is_open = False
        """Whether this block has begun to train and is not flushed."""
        self._feed_is_open = False
        """Whether a batch may still come, so that the END is not sent or seen yet."""
        self._board = FailureBoard(world_store(), name, self._rank)
        self._replicas: Replicas | None = None
        if self._place.replicas is not None:
            group_of_replicas = Group(f"{name}_replicas", self._place.replicas, self.block.device)
            self._replicas = Replicas(group_of_replicas, self._board)
            self._replicas.copy_first(self.block.held())
        self._near = Neighbours(name, self._place, self.spec, self.block, self._board)
        self._meeting: Meeting = Alone()
        if len(everyone) > 1:
            host = torch.device("cpu")
            self._meeting = Together(Group(f"{name}_meeting", everyone, host), self._near.check)
        advise_nesterov([self.block])
        atexit.register(_close, weakref.ref(self), os.getpid())

    # The five calls of a training loop

    def feed(self, loader: Iterable[Any] | None) -> Iterator[tuple[Any, Any]]:
        """The pairs (x, target) of `loader` on block 0; as many pairs (None, None) on the others, which ignore it.

        Raises BlockFailed if another block failed; what the loader raises, it raises here and ends all processes.
        """
        with self._telling():
            self._open()
            self._end_feed()  # of a loop that was left with a break
            self._feed_is_open = True
            if self.block.index > 0:
                offered = None
                while self._expect_batch():
                    assert self._near.from_last is not None
                    message = self._near.from_last.peek()
                    if message is offered:
                        raise RuntimeError(
                            f"feed was asked for the batch after {self.num_batches} before step() took that: every "
                            "pair is a step, also (None, None)"
                        )
                    offered = message
                    yield None, None
            else:
                try:
                    yield from self._read(loader)
                finally:
                    self._end_feed()

    def step(self, x: Any = None, target: Any = None) -> torch.Tensor | None:
        """Train on the next batch; `x` and `target` enter on block 0 and are ignored elsewhere.

        Returns the batch's loss, detached, on the last block, else None. Raises BlockFailed if another failed.
        """
        with self._telling():
            self._open()
            self._feed_is_open = True
            batch = self._next_batch(x, target)
            passed_on = self.block.forward(batch)
            if self._near.to_next is not None:
                value = (passed_on.value, passed_on.target, passed_on.rng)
                self._near.to_next.send(Kind.DATA, batch.n, value)
            self.num_batches += 1
            if self.block.is_due:
                self._backward()
            return self.block.loss if self.block.is_last else None

    def flush(self) -> None:
        """Finish the batches under way. Returns when all blocks have trained on all batches.

        The next step begins a new warm-up; random numbers, batch counts and schedules go on.
        """
        with self._telling():
            if not self._stream_is_open:
                return
            self._end_feed()
            self._pass_on(Kind.FLUSH)
            while self.block.flights:
                self._backward()
            if self.block.group_is_open:
                self.block.update()
            if self._near.from_next is not None:
                self._near.from_next.get(Kind.DONE)
            if self._near.to_last is not None:
                self._near.to_last.send(Kind.DONE, last=True)
            self._pass_on(Kind.DONE)
            self._near.drain()
            self._stream_is_open = False

    def eval(self, x: Any = None) -> Any:
        """The model's output for `x` (given on block 0) on the last block, else None; in eval mode.

        At the present weights; touches nothing that is under way. Collective: all ranks call it at the same place.
        """
        with self._telling():
            if self._near.from_last is not None:
                if self._feed_is_open:
                    self._expect_batch()  # takes the END of a loop that was left with a break
                x = self._near.from_last.get(Kind.EVAL).value
            output = self.block.eval(x)
            if self._near.to_next is None:
                return output
            self._near.to_next.send(Kind.EVAL, value=output, last=not self._feed_is_open)
            return None

    def close(self) -> None:
        """Leave. Before a flush this ends the other processes' training, too, with BlockFailed."""
        if self._stream_is_open and self._failure is None:
            if self.block.flights:
                warnings.warn(
                    f"block {self.block.index} leaves with {len(self.block.flights)} batches under way, for which "
                    "it makes no updates: call flush() on all ranks when training ends",
                    stacklevel=2,
                )
            self._fail(BlockFailed(self._rank, "it left the pipeline before flush()"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._failure is None:
            self._fail(error)
        self.close()

    # Batches

    def _open(self) -> None:
        """Begin to train, unless it has begun, and raise what has come from a neighbour that failed."""
        self._stream_is_open = True
        self._near.open()

    def _read(self, loader: Iterable[Any] | None) -> Iterator[tuple[Any, Any]]:
        if loader is None:
            raise TypeError("feed(None) on block 0: expected the loader")
        nothing = object()
        batches = iter(loader)
        while True:
            item = next(batches, nothing)
            if self._replicas is not None and not self._replicas.all_have_more(item is not nothing):
                if item is not nothing:
                    warnings.warn(
                        f"the loader of rank {self._rank} had more batches than that of another replica: they are "
                        "left out of this pass. Give all replicas equally many",
                        stacklevel=3,
                    )
                return
            if item is nothing:
                return
            yield pair_of(item)

    def _expect_batch(self) -> bool:
        """Whether another batch comes from block 0; passes its END on."""
        assert self._near.from_last is not None
        if self._near.from_last.peek().kind != Kind.END:
            return True
        self._end_feed()
        return False

    def _end_feed(self) -> None:
        """Say, or hear and pass on, that no batch comes for now."""
        if self._feed_is_open and self._failure is None:
            self._feed_is_open = False
            self._pass_on(Kind.END)

    def _pass_on(self, kind: Kind) -> None:
        """Hear from the block before what concerns all, and tell the next; the first begins."""
        if self._near.from_last is not None:
            self._near.from_last.get(kind)
        if self._near.to_next is not None:
            self._near.to_next.send(kind, self.num_batches, last=True)

    def _next_batch(self, x: Any, target: Any) -> Batch:
        if self._near.from_last is not None:
            message = self._near.from_last.get(Kind.DATA)
            assert message.n == self.num_batches, (message.n, self.num_batches)
            return Batch(message.n, *message.value)
        if x is None:
            raise ValueError("step(None) on block 0: expected the batch, x and target, from feed(loader)")
        replica, size = self._replica
        with batch_rng(self._options.seed, self.num_batches * size + replica):
            return enter(self.num_batches, x, target)

    def _backward(self) -> None:
        n = self.block.flights[0].n
        self.block.recompute()  # while the gradient is on its way
        gradients = None
        if self._near.from_next is not None:
            message = self._near.from_next.get(Kind.GRADIENT)
            assert message.n == n, (message.n, n)
            gradients = message.value
        of_input = self.block.backward(gradients)
        if self._near.to_last is not None:
            self._near.to_last.send(Kind.GRADIENT, n, of_input)
        self.block.end_backward(n)

    def _average(self) -> None:
        if self._replicas is not None:
            self._replicas.average(self.block.trained())

    # For checkpoints

    @property
    def _own_blocks(self) -> Sequence[Block]:
        return [self.block]

    @property
    def _replica(self) -> tuple[int, int]:
        return (0, 1) if self._replicas is None else (self._replicas.rank, self._replicas.size)

    def _show_arrived(self, block: Block) -> list[Gradients]:
        if self._near.from_next is None:
            return []
        count = max(0, len(block.flights) - self.spec.m[block.index + 1])
        return [message.value for message in self._near.from_next.read_ahead(count)]

    def _replace_arrived(self, block: Block, gradients: list[Gradients] | None) -> None:
        if self._near.from_next is None:
            return
        if gradients is None:
            for _ in self._show_arrived(block):
                self._near.from_next.get(Kind.GRADIENT)
        else:
            pairs = zip(block.flights, gradients, strict=False)
            self._near.from_next.put_back([Message(Kind.GRADIENT, flight.n, value) for flight, value in pairs])

    def _resume(self, *, is_under_way: bool) -> None:
        self._stream_is_open = self._stream_is_open or is_under_way

    # Failures

    def _fail(self, error: BaseException) -> None:
        """Let this process's `error` be the last thing that the others hear from it."""
        self._failure = failure_of(error, self._rank)
        self._board.post(self._failure)
        self._near.relay(self._failure)
        if not isinstance(error, BlockFailed):
            error.add_note(f"on rank {self._rank}; the other ranks of the pipeline were told")
        self._near.await_answers()
        self._meeting.close()
        if self._replicas is not None:
            self._replicas.close()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What is raised inside is told to all."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except GeneratorExit:  # the loop was left with a break
            raise
        except Agreed as agreed:
            raise agreed.error from agreed.error.__cause__
        except BaseException as error:
            self._fail(error)
            raise


def _close(schedule: "weakref.ref[ScheduleDSP]", pid: int) -> None:
    """At the end of the process `pid`; one forked from it has its connections, and would speak for it."""
    if pid == os.getpid() and (found := schedule()) is not None:
        found.close()
