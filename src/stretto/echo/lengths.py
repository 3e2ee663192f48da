"""How many examples a pass has and how many updates they make, as far as a loader tells."""

import math
from typing import Any

from stretto.echo.factor import num_uses
from stretto.echo.settings import Settings, loader_length
from stretto.tree import flatten


def updates_per_epoch(loader: Any, settings: Settings) -> int | None:
    """Updates in an epoch that does not follow the passes; None where it does.

    round(e * len(loader)), at least 1, unless the user gave a number.
    """
    length = loader_length(loader)
    if settings.updates_per_epoch is not None or not settings.carry_over:
        return settings.updates_per_epoch
    if settings.factor == "auto" or length is None:
        return None
    return max(1, round(settings.factor * length))


def updates_in_pass(loader: Any, settings: Settings, pass_index: int, num_items: int, batch_size: int) -> int:
    """Updates of an epoch that is one pass of `num_items` items, each used exactly its number of times."""
    assert settings.factor != "auto"
    uses = int(num_uses(settings.factor, settings.seed, pass_index, 0, num_items).sum())
    return uses // batch_size if getattr(loader, "drop_last", False) else math.ceil(uses / batch_size)


def batch_size_of(loader: Any) -> int | None:
    """Examples in the first batch of a list, or the loader's `batch_size`; None where only a pass will tell."""
    if isinstance(loader, list | tuple):
        return _count_rows(loader[0]) if loader else None
    batch_size = getattr(loader, "batch_size", None)
    return batch_size if isinstance(batch_size, int) else None


def items_in_pass(loader: Any, settings: Settings) -> tuple[int | None, int | None]:
    """Items in a pass and items in its first batch, None where only a pass will tell."""
    if settings.unit == "batch":
        return loader_length(loader), 1
    batch_size = batch_size_of(loader)
    if isinstance(loader, list | tuple):
        return sum(_count_rows(batch) or 0 for batch in loader), batch_size
    num_items = loader_length(getattr(loader, "sampler", None))
    if batch_size is None or num_items is None:
        return None, None
    if getattr(loader, "drop_last", False):
        num_items -= num_items % batch_size
    return num_items, min(batch_size, num_items) or batch_size


def _count_rows(batch: Any) -> int | None:
    """Rows of the batch's first leaf, if it has rows."""
    leaves, _ = flatten(batch)
    return len(leaves[0]) if leaves and hasattr(leaves[0], "__len__") else None
