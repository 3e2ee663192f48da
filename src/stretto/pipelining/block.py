"""One block of a split model: all that is computed, nothing that is sent.

    forward(batch n)            stores the input; keeps no graph where m_k > 0, else the graph that backward uses
    backward(gradient)          of batch n - m_k: recomputes its output from the stored input at the present weights
                                (Algorithm 1 of arXiv 1909.02625), then, after every A-th batch, updates the weights

The simulator runs K of these in turn and `ScheduleDSP` one in each process, which is why both give the same bits.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer

from stretto.pipelining.checks import (
    check_gradients,
    check_graph,
    check_loss,
    check_module,
    check_optimizer,
    describe_value,
)
from stretto.pipelining.codec import pass_on
from stretto.pipelining.options import Options, accepts
from stretto.pipelining.passes import (
    Graph,
    eval_mode,
    kept_buffers,
    release,
    run_and_watch,
    track,
    trains_always,
)
from stretto.pipelining.repairs import predict_weights
from stretto.pipelining.rng import RngState, get_state, set_state
from stretto.tree import flatten

Gradients = list[torch.Tensor | None]
"""One for each leaf of what a block got as its input, None where nothing flows back."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes forward from block to block."""

    n: int
    """Batches that came before it."""
    value: Any
    """The input of the next block."""
    target: Any
    """For the loss function; travels to the last block."""
    rng: RngState
    """Where the random numbers of the next block begin."""


def pair_of(item: Any) -> tuple[Any, Any]:
    """What a loader gave, as (x, target): a pair, or an x alone. Raises TypeError for a longer tuple or list."""
    if not isinstance(item, tuple | list):
        return item, None
    if len(item) != 2:
        raise TypeError(
            f"the loader gave a {type(item).__name__} of {len(item)}: expected pairs (x, target), each of them "
            "possibly a tuple or a dict"
        )
    return item[0], item[1]


def enter(n: int, x: Any, target: Any) -> Batch:
    """Batch `n` at the first block, with the present random state.

    In memory of its own: a loader may fill the same tensors again. Raises RuntimeError in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("step() in torch.inference_mode(), where nothing can be trained: leave it before")
    leaves, structure = flatten((x, target))
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    x, target = pass_on(structure.build(detached))
    return Batch(n, x, target, get_state())


@dataclass(slots=True)
class Flight:
    """A batch between its forward and its backward in a block."""

    n: int
    value: Any
    rng: RngState
    graph: Graph | None = None
    """Kept from the forward where m_k = 0 or the backward uses stashed weights."""
    weights: dict[str, torch.Tensor] | None = None
    """The copy of the weights that the graph was made with, if any."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """The buffers that a graph made with copied weights began with: it can be made again after a checkpoint."""


class Block:
    """Block `index` of `options.spec.K`, with its optimizer and scheduler.

    `average` is called before each update, on the gradients of replicas. Raises ValueError for an optimizer or a
    scheduler of other parameters, and for `predict` with an optimizer without momentum.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        options: Options,
        average: Callable[[], None] | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.options = options
        self.m = options.spec.m[index]
        self.weights = dict(module.named_parameters())
        self.device = next((tensor.device for tensor in self.held()), torch.device("cpu"))
        self.is_last = index == options.spec.K - 1
        self.flights: deque[Flight] = deque()
        self.num_updates = 0
        self.group_is_open = False
        """Whether gradients were gathered since the last update."""
        self.loss: torch.Tensor | None = None
        """Of the last batch that went forward, on the last block."""
        self._average = average
        self._writes_to_input: bool | None = None
        self._writes_to_weights: set[str] | None = None
        self._copies: tuple[int, dict[str, torch.Tensor]] | None = None
        self._is_checked = False
        check_module(self)
        check_optimizer(self)
        if self.is_last:
            check_loss(options.loss_fn)
        self._drop_gradients()  # of whatever came before training

    @property
    def is_due(self) -> bool:
        """Whether a batch's backward belongs to this iteration: the first m_k are warm-up."""
        return len(self.flights) > self.m

    @property
    def keeps_graph(self) -> bool:
        """Whether the forward's graph is the backward's."""
        return self.m == 0 or self.options.spec.backward_params == "stashed"

    def held(self) -> list[torch.Tensor]:
        """The weights, their gradients and the buffers, which passes and updates change in place."""
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        held = [*self.weights.values(), *gradients, *self.module.buffers()]
        return [tensor for tensor in held if tensor.layout is torch.strided]

    def trained(self) -> list[nn.Parameter]:
        """The weights that get a gradient."""
        return [weight for weight in self.weights.values() if weight.requires_grad]

    def forward(self, batch: Batch) -> Batch:
        """Run the block on its next batch, and return what the next block gets; on the last one without a value."""
        flight = Flight(batch.n, batch.value, batch.rng)
        weights = self._forward_weights()
        if self.keeps_graph:
            if weights is not None:
                flight.weights = weights
                flight.buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            output, rng = self._run_with_graph(flight, batch.target)
        else:
            with torch.no_grad(), kept_buffers(self.module), self._kept_weights() as replaced:
                output, rng = self._run(flight, batch.value, replaced | (weights or {}))
        self.flights.append(flight)
        value = None if self.is_last else release(output, runs_again=not self.keeps_graph)
        return Batch(batch.n, value, batch.target, rng)

    def recompute(self) -> None:
        """Run the oldest batch under way again at the present weights, if it has no graph.

        It needs no gradient, and so can fill the time until that comes.
        """
        if self.flights[0].graph is None:
            self._run_with_graph(self.flights[0])

    def backward(self, gradients: Gradients | None) -> Gradients:
        """The backward of the oldest batch under way, from the `gradients` of its output (None on the last block).

        Returns those of its input, which can go on their way before `end_backward` updates the weights.
        """
        self.recompute()
        flight = self.flights.popleft()
        assert flight.graph is not None
        if flight.graph.loss is not None:
            loss = flight.graph.loss
            if loss.requires_grad:
                self._run_backward([loss], [torch.ones_like(loss) / self.options.accumulate])
        else:
            assert gradients is not None
            check_gradients(self, flight.n, flight.graph, gradients)
            pairs = zip(flight.graph.outputs, gradients, strict=True)
            given = [(end, gradient) for end, gradient in pairs if end is not None and gradient is not None]
            if given:
                self._run_backward([end for end, _ in given], [gradient for _, gradient in given])
        if flight.weights is not None:
            self._collect_gradients(flight.weights)
        self.group_is_open = True
        return flight.graph.input_gradients

    def _run_backward(self, ends: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        try:
            torch.autograd.backward(ends, gradients)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error) and self.m > 0 and self.keeps_graph:
                error.add_note(
                    f"block {self.index} keeps the graphs of {self.m} batches (backward_params='stashed'), and "
                    "what they hold must not change: frozen weights and buffers that do need "
                    "backward_params='current'"
                )
            raise

    def end_backward(self, n: int) -> None:
        """Update the weights if batch `n` is the last of a group."""
        if (n + 1) % self.options.accumulate == 0:
            self.update()

    def update(self) -> None:
        """Apply the gradients that were gathered."""
        self.group_is_open = False
        if self._average is not None:
            self._average()
        clip = self.options.clip
        if callable(clip):
            clip(self.trained())
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_(self.trained(), clip)
        if self.optimizer is not None:
            scale = self._rate_scale()
            rates = [group["lr"] for group in self.optimizer.param_groups]
            if scale == 1.0:  # it may change its own rate
                self.optimizer.step()
            else:
                for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * scale
                self.optimizer.step()
                for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
        self._drop_gradients()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.num_updates += 1

    def _drop_gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    @contextmanager
    def _kept_weights(self) -> Iterator[dict[str, torch.Tensor]]:
        """What a pass without a graph runs on in place of buffers and of weights that the block itself writes to.

        Frozen ones may be averages that a forward keeps; in the first pass their version counters tell which.
        """
        frozen = {name: weight for name, weight in self.weights.items() if not weight.requires_grad}
        names = set(frozen) if self._writes_to_weights is None else self._writes_to_weights & frozen.keys()
        copies = {name: nn.Parameter(frozen[name].detach().clone(), requires_grad=False) for name in names}
        used = {**frozen, **copies}
        versions = {name: weight._version for name, weight in used.items()}
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        yield {**copies, **buffers}
        written = {name for name, weight in used.items() if weight._version != versions[name]}
        if late := written - names:
            raise RuntimeError(
                f"block {self.index} wrote to its frozen weights {sorted(late)}, which it did not do on its first "
                "batch, and would do so twice a batch: register them as buffers, or write from the first batch on"
            )
        if self._writes_to_weights is None:
            self._writes_to_weights = written

    def eval(self, value: Any) -> Any:
        """The output for `value` in eval mode, at the present weights; touches nothing that is under way.

        Raises RuntimeError for a module that `eval()` does not reach.
        """
        if operation := trains_always(self.module):
            raise RuntimeError(
                f"block {self.index} holds {operation} in training mode for good: eval() does not reach into what "
                "torch's pipeline() cut. Evaluate the plain model with the merged weights, or cut with "
                "stretto.pipelining.partition"
            )
        with torch.no_grad(), eval_mode(self.module), self.options.autocasting(self.device):
            return self.module(*self._arguments(value))

    def drop_copies(self) -> None:
        """Forget copies of the present weights, which were replaced."""
        self._copies = None

    def rebuild_graph(self, flight: Flight) -> None:
        """Make the graph of a flight with copied weights again, as after loading a checkpoint."""
        assert flight.weights is not None
        with self._kept_weights() as replaced:
            # Copies, as a graph may hold buffers, which may then not be written to from outside.
            began_with = {name: buffer.clone() for name, buffer in flight.buffers.items()}
            self._run_with_graph(flight, replaced=replaced | began_with)

    def _run_with_graph(
        self, flight: Flight, target: Any = None, replaced: dict[str, torch.Tensor] | None = None
    ) -> tuple[Any, RngState]:
        """Run the block, with what is `replaced` in it; keep the graph in `flight`, on the last block the loss."""
        with torch.enable_grad():
            inputs, graph = track(flight.value)
            output, rng = self._run(flight, inputs, (flight.weights or {}) | (replaced or {}), graph, target)
        graph.outputs = [
            leaf if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in flatten(output)[0]
        ]
        flight.graph = graph
        if not self._is_checked:
            self._is_checked = True
            check_graph(self, graph)
        return output, rng

    def _run(
        self,
        flight: Flight,
        value: Any,
        replaced: dict[str, torch.Tensor],
        graph: Graph | None = None,
        target: Any = None,
    ) -> tuple[Any, RngState]:
        """One pass, with the random numbers of the batch, and the process's own put back."""
        found = get_state()
        set_state(flight.rng)
        try:
            with self.options.autocasting(self.device):
                output = self._call(value, replaced)
                if self.is_last:
                    assert graph is not None
                    graph.loss = self.options.loss(output, target)
                    self.loss = graph.loss.detach()
            return output, get_state(flight.rng)
        except Exception as error:
            error.add_note(
                f"in block {self.index} of {self.options.spec.K}, batch {flight.n}, whose input was "
                f"{describe_value(flight.value)}"
            )
            raise
        finally:
            set_state(found)

    def _call(self, value: Any, replaced: dict[str, torch.Tensor]) -> Any:
        """Call the module on `value`, or on a copy if it writes to what it gets."""

        def call(given: Any) -> Any:
            arguments = self._arguments(given)
            return functional_call(self.module, replaced, arguments) if replaced else self.module(*arguments)

        output, self._writes_to_input = run_and_watch(call, value, self._writes_to_input)
        return output

    def _arguments(self, value: Any) -> tuple[Any, ...]:
        """A tuple is spread over the arguments of a forward that takes so many, as torch's pipelines do."""
        spread = type(value) is tuple and len(value) != 1 and accepts(self.module, len(value))
        return value if spread else (value,)

    def _forward_weights(self) -> dict[str, torch.Tensor] | None:
        """The weights of a stale forward where they are not the present ones themselves; made once per update."""
        predicts = self.options.repairs.predict and self.optimizer is not None
        if self.m == 0 or not (predicts or self.keeps_graph):
            return None
        if self._copies is None or self._copies[0] != self.num_updates:
            # Frozen ones have one age only, and may be averages that the forward writes to.
            weights = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
            if predicts:
                assert self.optimizer is not None
                copies = predict_weights(weights, self.optimizer, self._delay, self._rate_scale())
            else:
                copies = {name: weight.detach().clone() for name, weight in weights.items()}
            for copied in copies.values():
                copied.requires_grad_(self.keeps_graph)
            self._copies = (self.num_updates, copies)
        return self._copies[1]

    def _collect_gradients(self, copies: dict[str, torch.Tensor]) -> None:
        """Add the gradients of copied weights to those of the weights themselves."""
        for name, copied in copies.items():
            weight = self.weights[name]
            gradient, copied.grad = copied.grad, None
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    @property
    def _delay(self) -> float:
        """Updates between a batch's forward and its backward."""
        return self.m / self.options.accumulate

    def _rate_scale(self) -> float:
        return self.options.repairs.rate_scale(self._delay, self.num_updates)
