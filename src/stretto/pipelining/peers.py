"""Other ways to train a split model without waiting, as baselines: DGL and DNI, in one process.

In both every block trains at once, on a gradient that an auxiliary network at its output provides, and no gradient
crosses a boundary between blocks:

    DGL   each auxiliary network is a classifier; the gradient is that of its own loss (Belilovsky et al.,
          "Decoupled Greedy Learning of CNNs", arXiv 1901.08164, Algorithm 1)
    DNI   each auxiliary network predicts the gradient itself, and learns from what the block behind finds: its own
          input gradient (Jaderberg et al., "Decoupled Neural Interfaces using Synthetic Gradients",
          arXiv 1608.05343, equation 6)

Nothing is stale: block k trains on what block k-1 gave before its update on the same batch. The last block trains
on the loss itself. K = 1 is plain training.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.pipelining.block import Batch, Block, Gradients, enter
from stretto.pipelining.block_state import State
from stretto.pipelining.checks import check_parameters
from stretto.pipelining.codec import pass_on
from stretto.pipelining.options import LossFn, Options, accepts
from stretto.pipelining.passes import track
from stretto.pipelining.rng import batch_rng
from stretto.pipelining.simulate import Simulation, make_blocks
from stretto.pipelining.spec import Staleness


class LocalTraining(Simulation):
    """What DGL and DNI share: blocks that train one after the other, each on a gradient of its own.

    `auxiliaries` and `auxiliary_optimizers`: one for each block but the last. `lr_scheduler`: one for each block,
    `auxiliary_lr_scheduler`: one for each auxiliary network; stepped here after each batch.

    Used as what `simulate` returns: `feed`, `step`, `flush`, `eval`.

    Raises ValueError for another number of any of them, and as `simulate` does.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        auxiliaries: Sequence[nn.Module],
        optimizers: Sequence[Optimizer | None],
        auxiliary_optimizers: Sequence[Optimizer],
        loss_fn: LossFn | None = None,
        *,
        lr_scheduler: Sequence[Any] | None = None,
        auxiliary_lr_scheduler: Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        num_blocks = len(blocks)
        options = Options(spec=Staleness.backprop(num_blocks), loss_fn=loss_fn, seed=seed)
        self.auxiliaries = list(auxiliaries)
        self._optimizers = list(auxiliary_optimizers)
        of_auxiliaries: list[Any] = [None] * (num_blocks - 1)
        self._schedulers = of_auxiliaries if auxiliary_lr_scheduler is None else list(auxiliary_lr_scheduler)
        for name, given in (
            ("auxiliaries", self.auxiliaries),
            ("auxiliary_optimizers", self._optimizers),
            ("auxiliary_lr_scheduler", self._schedulers),
        ):
            if len(given) != num_blocks - 1:
                raise ValueError(
                    f"{len(given)} {name} for {num_blocks} blocks: expected {num_blocks - 1}, one for each but the "
                    "last"
                )
        for k, (network, optimizer) in enumerate(zip(self.auxiliaries, self._optimizers, strict=True)):
            check_parameters(optimizer, network, f"auxiliary network {k}")
        super().__init__(make_blocks(blocks, optimizers, lr_scheduler, options), options)
        self._predictions: dict[int, torch.Tensor] = {}
        """Gradients that were predicted for a block's output, until the true one comes (DNI)."""

    def step(self, x: Any, target: Any = None) -> torch.Tensor:
        """Train every block on the batch, and return the loss (detached) of the last one."""
        seed = self._options.seed
        with batch_rng(seed, self.num_batches):
            batch = enter(self.num_batches, x, target)
        self.num_batches += 1
        for block in self.blocks:
            # What goes on was computed before the update, as where the blocks work at the same time.
            output = block.forward(batch)
            batch = Batch(output.n, pass_on(output.value), output.target, output.rng)
            gradients: Gradients | None = None
            if not block.is_last:
                with batch_rng(seed, batch.n):
                    gradients = self._provide(block.index, batch)
            of_input = block.backward(gradients)
            if block.index > 0:
                self._hand_back(block.index - 1, of_input)
            block.end_backward(batch.n)
        loss = self.blocks[-1].loss
        assert loss is not None
        return loss

    def _capture(self) -> list[State]:
        raise TypeError(
            f"{type(self).__name__} is a baseline without checkpoints, which would lack the auxiliary networks: "
            "keep the state_dict() of blocks, networks, optimizers and schedulers yourself"
        )

    def _load(self, read: Callable[[Block], State]) -> None:  # noqa: ARG002
        self._capture()

    @abstractmethod
    def _provide(self, index: int, batch: Batch) -> Gradients:
        """The gradient that block `index` trains on, at its output `batch.value`."""

    def _hand_back(self, index: int, gradients: Gradients) -> None:
        """Take what the block behind found as the gradient of block `index`'s output."""

    def _update(self, index: int) -> None:
        optimizer, scheduler = self._optimizers[index], self._schedulers[index]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()


class GreedyTraining(LocalTraining):
    """DGL: every block but the last trains on the loss of its own auxiliary head.

    `auxiliaries[k]` maps block k's output to what `loss_fn(output, target)` takes, as the whole model does.
    """

    def _provide(self, index: int, batch: Batch) -> Gradients:
        value, graph = track(batch.value)
        self._options.loss(self.auxiliaries[index](value), batch.target).backward()  # type: ignore[no-untyped-call]
        self._update(index)
        return graph.input_gradients


class SyntheticGradients(LocalTraining):
    """DNI: every block but the last trains on a gradient that a network predicts from its output.

    `auxiliaries[k]` is called as f(output, target) if it takes two arguments (the paper's cDNI, which knows the
    label), else as f(output), and returns a tensor of the output's shape: the gradient times the number of rows,
    that is, the one of the loss summed over the batch, whose size does not depend on the batch's. It learns by
    squared error. Its last layer should begin at 0, so that a block does not move before anything is known.

    A block's output must be one tensor [rows, ...]; `step` raises TypeError otherwise.
    """

    def _provide(self, index: int, batch: Batch) -> Gradients:
        output, network = batch.value, self.auxiliaries[index]
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"block {index} gave a {type(output).__name__}: a synthetic gradient is predicted for one tensor. "
                "Cut the model where one tensor passes"
            )
        output = output.detach()
        predicted = network(output, batch.target) if accepts(network, 2) else network(output)
        if predicted.shape != output.shape:
            raise ValueError(
                f"auxiliary network {index} gave {list(predicted.shape)} for an output of {list(output.shape)}: "
                "expected the gradient, of the same shape"
            )
        self._predictions[index] = predicted
        return [predicted.detach() / len(output)]

    def _hand_back(self, index: int, gradients: Gradients) -> None:
        predicted = self._predictions.pop(index)
        [found] = gradients
        wanted = torch.zeros_like(predicted) if found is None else found * len(predicted)
        nn.functional.mse_loss(predicted, wanted).backward()  # type: ignore[no-untyped-call]
        self._update(index)
