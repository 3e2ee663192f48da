"""The names of a block's parameters: those of the plain model where they are known, else with the block's number.

`partition` makes blocks whose `state_dict` has the plain model's own keys, and marks them. The names of blocks
made by hand begin with the number of the block, such as "2.weight".
"""

from collections.abc import Iterable, Sequence

from torch import nn
from torch.fx import GraphModule

_MARK = "_stretto_keeps_names"


def keep_names(block: nn.Module) -> nn.Module:
    """Mark `block` as one whose keys are the plain model's; the mark stays with its copies."""
    setattr(block, _MARK, True)
    if isinstance(block, GraphModule):  # a copy of one keeps nothing else
        block.meta[_MARK] = True
    return block


def name_prefix(block: nn.Module, index: int) -> str:
    """What stands before the keys of `block` in the merged weights: nothing, or its number and a dot."""
    keeps = getattr(block, _MARK, False) or (isinstance(block, GraphModule) and _MARK in block.meta)
    return "" if keeps else f"{index}."


def check_names(names_of_blocks: Sequence[Iterable[str]]) -> None:
    """Raise ValueError if two blocks have a key in common, naming the key and both blocks."""
    owners: dict[str, int] = {}
    for index, names in enumerate(names_of_blocks):
        for name in names:
            if name in owners:
                raise ValueError(
                    f"{name!r} is a name in block {owners[name]} and in block {index}: names of merged weights "
                    "must differ. Cut the model with stretto.pipelining.partition, or copy what the blocks share"
                )
            owners[name] = index
