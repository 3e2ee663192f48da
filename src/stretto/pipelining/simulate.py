"""A split model in one process: the blocks in turn, every batch as late as the staleness says.

It computes what K processes of `ScheduleDSP` compute, bit for bit, and answers before anything is distributed: what
would staleness do to my model and my optimizer?
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.pipelining.block import Block, Gradients, enter, pair_of
from stretto.pipelining.checkpoint import Checkpointed
from stretto.pipelining.checks import advise_nesterov
from stretto.pipelining.codec import pass_on
from stretto.pipelining.layers import check_not_tied
from stretto.pipelining.meeting import Alone
from stretto.pipelining.names import check_names, name_prefix
from stretto.pipelining.options import Autocast, Clip, LossFn, Options
from stretto.pipelining.repairs import Repairs
from stretto.pipelining.rng import batch_rng
from stretto.pipelining.spec import BackwardParams, PerBlock, Staleness


def simulate(
    blocks: Sequence[nn.Module],
    optimizers: Sequence[Optimizer | None],
    loss_fn: LossFn | None = None,
    *,
    p: PerBlock | None = None,
    m: PerBlock | Staleness | str | None = None,
    backward_params: BackwardParams | None = None,
    accumulate: int = 1,
    lr_scheduler: Sequence[Any] | None = None,
    clip: Clip | None = None,
    autocast: Autocast | None = None,
    repairs: Repairs | None = None,
    seed: int = 0,
) -> "Simulation":
    """Train `blocks`, one after the other, as K processes of `ScheduleDSP` would, in this one.

    - `optimizers`, `lr_scheduler`: one for each block; None for a block without parameters to train. A scheduler is
      stepped here, once after each update of its block.
    - Everything else: as in `ScheduleDSP`.

    Raises ValueError for an impossible (p; m), tied weights across blocks, and settings that cannot be meant.
    """
    options = Options(
        spec=Staleness.of(len(blocks), p, m, backward_params),
        loss_fn=loss_fn,
        accumulate=accumulate,
        clip=clip,
        autocast=autocast,
        repairs=repairs or Repairs(),
        seed=seed,
    )
    built = make_blocks(blocks, optimizers, lr_scheduler, options)
    advise_nesterov(built)
    return Simulation(built, options)


def make_blocks(
    modules: Sequence[nn.Module],
    optimizers: Sequence[Optimizer | None],
    lr_scheduler: Sequence[Any] | None,
    options: Options,
) -> list[Block]:
    """All blocks of a model, in this process. Raises TypeError or ValueError for what does not fit together."""
    check_not_tied(modules)
    schedulers = [None] * len(modules) if lr_scheduler is None else lr_scheduler
    for name, given in (("optimizers", optimizers), ("lr_scheduler", schedulers)):
        if not isinstance(given, list | tuple):
            raise TypeError(f"{name}={given!r:.60}: expected a list, with one for each of {len(modules)} blocks")
        if len(given) != len(modules):
            raise ValueError(f"{len(given)} {name} for {len(modules)} blocks: expected one for each (or None)")
    check_names([[name_prefix(part, k) + name for name in part.state_dict()] for k, part in enumerate(modules)])
    return [
        Block(module, index, optimizer, scheduler, options)
        for index, (module, optimizer, scheduler) in enumerate(zip(modules, optimizers, schedulers, strict=True))
    ]


class Simulation(Checkpointed):
    """What `simulate` returns."""

    _meeting = Alone()

    def __init__(self, blocks: Sequence[Block], options: Options) -> None:
        self.blocks = list(blocks)
        self.spec = options.spec
        self._options = options
        self._gradients: list[deque[Gradients]] = [deque() for _ in blocks]
        """For each block, those that have come and are not used yet."""
        self.num_batches = 0
        self._error: BaseException | None = None

    def feed(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """The pairs (x, target) of `loader`."""
        for item in loader:
            yield pair_of(item)

    def step(self, x: Any, target: Any = None) -> torch.Tensor:
        """Train on the next batch, a micro-batch if `accumulate` > 1, and return its loss, detached."""
        with self._whole():
            with batch_rng(self._options.seed, self.num_batches):
                batch = enter(self.num_batches, x, target)
            for block in self.blocks:
                batch = block.forward(batch)
                batch = replace(batch, value=pass_on(batch.value))
            self.num_batches += 1
            for block in reversed(self.blocks):
                if block.is_due:
                    self._backward(block)
        loss = self.blocks[-1].loss
        assert loss is not None
        return loss

    def flush(self) -> None:
        """Finish the batches under way, so that every block has trained on every batch."""
        with self._whole():
            for block in reversed(self.blocks):
                while block.flights:
                    self._backward(block)
                if block.group_is_open:
                    block.update()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """For what leaves some blocks ahead of others if it fails."""
        with self._telling():
            try:
                yield
            except BaseException as error:
                self._error = error
                raise

    def eval(self, x: Any) -> Any:
        """The model's output for `x` in eval mode at the present weights; what is under way stays so."""
        value = x
        for block in self.blocks:
            value = block.eval(value)
        return value

    def _backward(self, block: Block) -> None:
        gradients = None if block.is_last else self._gradients[block.index].popleft()
        n = block.flights[0].n
        of_input = block.backward(gradients)
        if block.index > 0:
            self._gradients[block.index - 1].append(pass_on(of_input))
        block.end_backward(n)

    # For checkpoints

    @property
    def _own_blocks(self) -> Sequence[Block]:
        return self.blocks

    @contextmanager
    def _telling(self) -> Iterator[None]:
        if self._error is not None:
            raise RuntimeError(
                "an earlier step failed and left the blocks at different batches: make a new simulation, and load "
                "a checkpoint if there is one"
            ) from self._error
        yield

    def _show_arrived(self, block: Block) -> list[Gradients]:
        return list(self._gradients[block.index])

    def _replace_arrived(self, block: Block, gradients: list[Gradients] | None) -> None:
        self._gradients[block.index] = deque(gradients or ())
