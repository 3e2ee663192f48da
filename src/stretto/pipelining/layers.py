"""A model as a row of layers, and blocks made of some of them under the plain model's own names."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stretto.pipelining.names import keep_names, name_prefix


@dataclass(frozen=True, slots=True)
class Layer:
    """What a cut leaves whole."""

    name: str
    """In the plain model, such as "2.0" or "features.conv"."""
    module: nn.Module
    containers: tuple[nn.Sequential, ...]
    """The containers that hold it, the model first."""


def layers_of(model: nn.Module | Sequence[nn.Module]) -> list[Layer]:
    """The layers of an `nn.Sequential`, or of a list of modules, in the order in which they run.

    Inner containers are opened where they are plain: exactly nn.Sequential, without hooks or tensors of their own.

    Raises TypeError for a model of another kind, ValueError for one with hooks or tensors of its own.
    """
    if isinstance(model, list | tuple):
        strangers = [type(each).__name__ for each in model if not isinstance(each, nn.Module)]
        if strangers or not model:
            raise TypeError(f"a list of {', '.join(strangers) or 'nothing'}: expected a list of torch modules")
        model = nn.Sequential(*model)
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        kind = f"{type(model).__name__}, whose forward is its own" if isinstance(model, nn.Module) else repr(model)
        raise TypeError(
            f"the model is {kind}: expected an nn.Sequential, or a list of modules that run one after the other. "
            "Another model can be split by torch.distributed.pipelining.pipeline(model, mb_args=..., "
            "split_spec=...), whose result partition() takes as it is"
        )
    if not _is_bare(model):
        raise ValueError(
            "the model itself has hooks, parameters, buffers or another forward, which would belong to no block: "
            "put them on one of its layers"
        )
    return _open(model, "", ())


def build_block(layers: Sequence[Layer]) -> nn.Sequential:
    """A module that runs `layers` in a row, shares them with the model, and has its names for them."""
    block = nn.Sequential()
    block.training = layers[0].containers[0].training
    for layer in layers:
        *inner, last = layer.name.split(".")
        place = block
        for name, container in zip(inner, layer.containers[1:], strict=True):
            if name not in place._modules:
                place.add_module(name, nn.Sequential())
                place[-1].training = container.training
            place = place._modules[name]  # type: ignore[assignment]  # a container that this made
        place.add_module(last, layer.module)
    keep_names(block)
    return block


def check_not_tied(blocks: Sequence[nn.Module]) -> None:
    """Raise ValueError if two blocks share a parameter or a buffer: on two devices they would drift apart.

    The message has both full names. Tied tensors inside one block are fine.
    """
    owners: dict[int, tuple[int, str]] = {}
    for index, block in enumerate(blocks):
        prefix = name_prefix(block, index)
        mine: dict[int, tuple[int, str]] = {}
        for kind, tensors in (
            ("parameter", block.named_parameters(remove_duplicate=False)),
            ("buffer", block.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in tensors:
                for key in _identity(tensor):
                    mine.setdefault(key, (index, prefix + name))
                    if key in owners:
                        other, other_name = owners[key]
                        raise ValueError(
                            f"the {kind} {prefix + name!r} of block {index} is {other_name!r} of block {other}, "
                            "too: each block trains its own, so the two would drift apart. Cut so that both are in "
                            "one block, or give them weights of their own"
                        )
        owners.update(mine)


def _open(container: nn.Sequential, prefix: str, outer: tuple[nn.Sequential, ...]) -> list[Layer]:
    layers: list[Layer] = []
    for name, module in container._modules.items():
        assert module is not None, "nn.Sequential runs every entry"
        if type(module) is nn.Sequential and _is_bare(module):
            layers += _open(module, f"{prefix}{name}.", (*outer, container))
        else:
            layers.append(Layer(prefix + name, module, (*outer, container)))
    return layers


def _is_bare(container: nn.Sequential) -> bool:
    """Whether it only holds other modules, and runs them in a row."""
    hooks = (
        container._forward_hooks,
        container._forward_pre_hooks,
        container._backward_hooks,
        container._backward_pre_hooks,
    )
    return not any((container._parameters, container._buffers, *hooks, "forward" in vars(container)))


def _identity(tensor: torch.Tensor) -> set[int]:
    """What two tensors have in common if they are the same one, or begin at the same memory."""
    address = 0 if tensor.is_meta or tensor.layout is not torch.strided else tensor.data_ptr()
    return {id(tensor)} | ({-address} if address else set())
