"""The state of a block as plain containers, numbers and tensors, also of the batches that are under way.

unsaved_buffers       those that the module's state_dict leaves out
model, optimizer      under the plain model's names; `parameters` says which of them are no buffers
lr_scheduler, num_batches, num_updates, group_is_open
gradients             gathered in a group that is open
flights               stored inputs with batch number and random state; with stashed weights what their graphs
                      are made from again: `weights`, one for each update that they date from, and buffers
arrived               gradients from the next block that no backward has used yet
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from stretto.pipelining.block import Block, Flight, Gradients
from stretto.pipelining.names import name_prefix
from stretto.state import PLAIN, to_plain
from stretto.tree import flatten, tensors_of

VERSION = 1
State = dict[str, Any]


def settings_of(block: Block, replica: tuple[int, int]) -> dict[str, Any]:
    """What must be the same where a state is loaded; `replica` is (rank, size)."""
    return block.options.shared() | {
        "block": block.index,
        "replica": replica[0],
        "replicas": replica[1],
        "optimizer": _kind(block.optimizer),
        "lr_scheduler": _kind(block.lr_scheduler),
    }


def weights_of(block: Block) -> dict[str, Any]:
    """The block's weights and buffers under the plain model's names."""
    prefix = name_prefix(block.module, block.index)
    return {prefix + name: value for name, value in block.module.state_dict().items()}


def capture(block: Block, arrived: Sequence[Gradients], num_batches: int, replica: tuple[int, int]) -> State:
    """The state of `block`, tensors on the CPU and without a copy if they are there.

    Raises TypeError for what no checkpoint can hold, such as a batch under way of another library's type.
    """
    prefix = name_prefix(block.module, block.index)
    versions = {id(flight.weights): flight.weights for flight in block.flights if flight.weights is not None}
    at = {key: number for number, key in enumerate(versions)}
    state = {
        "version": VERSION,
        "settings": settings_of(block, replica),
        "num_batches": num_batches,
        "num_updates": block.num_updates,
        "group_is_open": block.group_is_open,
        "model": weights_of(block),
        "unsaved_buffers": {prefix + name: buffer for name, buffer in _unsaved_buffers(block).items()},
        "parameters": [prefix + name for name, _ in block.module.named_parameters(remove_duplicate=False)],
        "optimizer": _capture_optimizer(block, prefix),
        "lr_scheduler": None if block.lr_scheduler is None else block.lr_scheduler.state_dict(),
        "gradients": {
            prefix + name: weight.grad
            for name, weight in block.module.named_parameters()
            if weight.grad is not None
        },
        "weights": list(versions.values()),
        "flights": [
            {
                "n": flight.n,
                "input": _pack(flight.value, f"batch {flight.n} in block {block.index}"),
                "rng": flight.rng,
                "weights": at.get(id(flight.weights)),
                "buffers": flight.buffers,
            }
            for flight in block.flights
        ],
        "arrived": [_pack(gradients, f"a gradient in block {block.index}") for gradients in arrived],
    }
    plain: State = to_plain(state, f"the state of block {block.index}")
    return plain


def check(block: Block, state: State) -> None:
    """Raise ValueError if `state`, whose settings are right, does not fit `block`."""
    prefix = name_prefix(block.module, block.index)
    own = weights_of(block)
    check_weights(own, state["model"], block)
    for name, mine in own.items():
        found = getattr(state["model"][name], "dtype", None)
        if isinstance(mine, torch.Tensor) and found != mine.dtype:
            raise ValueError(f"{name} of block {block.index} is {mine.dtype}, that of the state {found}")
    if block.optimizer is not None:
        groups = _groups(block, prefix)
        saved = [group["params"] for group in state["optimizer"]["param_groups"]]
        if groups != saved:
            raise ValueError(
                f"the optimizer of block {block.index} has the groups of parameters {groups}, that of the state "
                f"{saved}: expected the same"
            )


def check_weights(own: Mapping[str, Any], given: Mapping[str, Any], block: Block) -> None:
    """Raise ValueError if `given` has other keys or shapes than the block's `own` weights."""
    if own.keys() != given.keys():
        raise ValueError(
            f"the weights of block {block.index} do not fit: missing {sorted(own.keys() - given.keys())}, "
            f"unexpected {sorted(given.keys() - own.keys())}. Was the model cut elsewhere? partition(by=(...)), "
            "with the numbers of layers, cuts as before"
        )
    for name, mine in own.items():
        found = getattr(given[name], "shape", None)
        if isinstance(mine, torch.Tensor) and found != mine.shape:
            raise ValueError(f"{name} of block {block.index} has the shape {mine.shape}, the given one {found}")


def load_weights(block: Block, given: Mapping[str, Any]) -> None:
    """Copy weights, under the plain model's names, into the block. They were checked."""
    prefix = name_prefix(block.module, block.index)
    block.module.load_state_dict({name.removeprefix(prefix): value for name, value in given.items()})
    block.drop_copies()


def restore(block: Block, state: State) -> list[Gradients]:
    """Bring `block` into `state`, which was checked and is used up; returns the gradients that had arrived."""
    prefix = name_prefix(block.module, block.index)
    load_weights(block, state["model"])
    for name, buffer in _unsaved_buffers(block).items():
        if (saved := state["unsaved_buffers"].get(prefix + name)) is not None and saved.shape == buffer.shape:
            buffer.copy_(saved)
    parameters = dict(block.module.named_parameters())
    if block.optimizer is not None:
        _restore_optimizer(block, state["optimizer"], prefix)
    if block.lr_scheduler is not None:
        block.lr_scheduler.load_state_dict(state["lr_scheduler"])
    block.num_updates = state["num_updates"]
    block.group_is_open = state["group_is_open"]
    for name, weight in parameters.items():
        gradient = state["gradients"].get(prefix + name)
        weight.grad = None if gradient is None else gradient.to(weight.device)
    versions = [
        {
            name: value.to(block.device).requires_grad_(parameters[name].requires_grad)
            for name, value in version.items()
        }
        for version in state["weights"]
    ]
    block.flights = deque(
        Flight(
            flight["n"],
            _unpack(flight["input"], block.device),
            tuple(flight["rng"]),
            weights=None if flight["weights"] is None else versions[flight["weights"]],
            buffers={name: value.to(block.device) for name, value in flight["buffers"].items()},
        )
        for flight in state["flights"]
    )
    for flight in block.flights:
        if flight.weights is not None:
            block.rebuild_graph(flight)
    return [_unpack(packed, block.device) for packed in state["arrived"]]


def _unsaved_buffers(block: Block) -> dict[str, torch.Tensor]:
    """Buffers that are no part of the module's `state_dict`, but may change in training."""
    saved = block.module.state_dict().keys()
    return {name: buffer for name, buffer in block.module.named_buffers() if name not in saved}


def _kind(value: Any) -> str | None:
    return None if value is None else type(value).__name__


def _groups(block: Block, prefix: str) -> list[list[str]]:
    """The names of the parameters in each group of the optimizer."""
    assert block.optimizer is not None
    names = {id(parameter): prefix + name for name, parameter in block.module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in block.optimizer.param_groups]


def _capture_optimizer(block: Block, prefix: str) -> State | None:
    """The optimizer's state, with names in place of numbers."""
    if block.optimizer is None:
        return None
    groups = _groups(block, prefix)
    names = dict(enumerate(name for group in groups for name in group))
    state = block.optimizer.state_dict()
    return {
        "state": {names.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": names_in_it}
            for group, names_in_it in zip(state["param_groups"], groups, strict=True)
        ],
    }


def _restore_optimizer(block: Block, saved: State, prefix: str) -> None:
    assert block.optimizer is not None
    names = [name for group in _groups(block, prefix) for name in group]
    numbers = {name: number for number, name in enumerate(names)}
    parameters = [parameter for group in block.optimizer.param_groups for parameter in group["params"]]
    state = {
        numbers.get(name, name): {key: _laid_out(value, parameters[numbers[name]]) for key, value in entry.items()}
        if name in numbers
        else entry
        for name, entry in saved["state"].items()
    }
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["param_groups"]]
    block.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """`value` with the parameter's order in memory, as its optimizer made it: other orders may round otherwise."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _pack(tree: Any, path: str) -> State:
    """`tree`, and what a tensor that was saved does not tell of itself."""
    _check_plain(tree, path)
    tensors = tensors_of(tree)
    return {
        "tree": tree,
        "requires_grad": [t.requires_grad for t in tensors],
        "on_cpu": [t.is_cpu for t in tensors],
    }


def _unpack(packed: State, device: torch.device) -> Any:
    leaves, structure = flatten(packed["tree"])
    told = zip(packed["requires_grad"], packed["on_cpu"], strict=True)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            requires_grad, on_cpu = next(told)
            leaves[at] = (leaf if on_cpu else leaf.to(device)).requires_grad_(requires_grad)
    return structure.build(leaves)


def _check_plain(tree: Any, path: str) -> None:
    """Raise TypeError for a part of `tree` that would come back as another type."""
    if isinstance(tree, torch.Tensor) or type(tree) in PLAIN:
        return
    parts: Iterable[tuple[Any, Any]]
    if type(tree) is dict:
        parts = tree.items()
    elif type(tree) in (tuple, list):
        parts = enumerate(tree)
    else:
        raise TypeError(
            f"{path} is a {type(tree).__name__}: batches under way are saved as dicts, lists and tuples of "
            "tensors, numbers and strings. Pass them on as such, or call flush() before saving"
        )
    for key, part in parts:
        _check_plain(part, f"{path}[{key!r}]")
