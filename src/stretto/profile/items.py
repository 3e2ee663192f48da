"""Looking at what a data set makes and draws: sizes, hashes, states of generators; and bugs that they show.

Nothing here draws a random number or changes a state, and nothing raises for an object that it does not know.
"""

import hashlib
import json
import random
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from stretto.echo.generators import GLOBAL_GENERATORS, MAX_DEPTH, WITHOUT_PARTS, parts_of, seeder_of
from stretto.profile.rows import read_rows
from stretto.tree import count_bytes

NUM_HASHED = 128
"""About how many indices are hashed in an iteration, and after how many items a process stops in any case."""
NUM_HASHED_ITERATIONS = 4
_FEWEST_COMPARED = 32
_MOST_VISITED = 3000
_HASHED_BYTES = 4096


def item_bytes(item: Any) -> float | None:
    """Bytes that a copy of `item` takes, of the tensors, arrays, images and strings in it."""
    try:
        leaves = pytree.tree_leaves(item)
        return float(sum(leaf.nbytes if _is_strided(leaf) else count_bytes(leaf) for leaf in leaves))
    except Exception:  # a class of the script's that does not like to be looked at
        return None


def item_hash(item: Any) -> int | None:
    """48 bits of a hash of `item`, over at most 4096 bytes of each leaf; None if a leaf is of an unknown type."""
    try:
        value = 0
        for leaf in pytree.tree_leaves(item):
            value = zlib.crc32(_some_bytes(leaf), value) ^ (value << 16 & 0xFFFF_0000_0000)
        return value
    except Exception:
        return None


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _some_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, str | bytes | int | float | bool | np.generic | None):
        return repr(leaf).encode()
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().as_subclass(torch.Tensor).numpy()
    elif not isinstance(leaf, np.ndarray):
        leaf = np.asarray(leaf)  # a picture
    if leaf.dtype.hasobject:
        raise TypeError(f"an array of {leaf.dtype}")
    flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    # An odd step, so that it meets the high bytes of numbers too: the low ones of small floats are 0.
    return flat[:: (len(flat) // _HASHED_BYTES) | 1].tobytes()


class RandomWatch:
    """The generators that making an item may draw from, and which of them a fetch moved."""

    def __init__(self, dataset: Any) -> None:
        self._generators = [
            *(("torch", torch.default_generator), ("numpy.random", np.random.mtrand._rand)),
            ("random", random._inst),
            *((_name(generator), generator) for generator in _held_by(dataset)),
        ]
        self.names = [name for name, _ in self._generators]
        self.start = self._digests()
        """Of each generator's state before the first fetch, "" where it has none that can be read."""
        self.moved = [False] * len(self.names)
        self._before = self.start

    def begin(self) -> None:
        """A fetch begins."""
        self._before = self._digests()

    def end(self) -> None:
        """The fetch is over."""
        now = self._digests()
        self.moved = [was or a != b for was, a, b in zip(self.moved, self._before, now, strict=True)]

    def _digests(self) -> list[str]:
        return [_digest(generator) for _, generator in self._generators]


def _held_by(dataset: Any) -> Iterator[Any]:
    """The generators held, each once, in an order that is the same in every process.

    As `HeldGenerators` finds them, which gives libraries' transforms a shared one and so changes what they draw.
    """
    kind = type(dataset)
    methods = [getattr(kind, name, None) for name in ("__iter__", "__getitems__")]
    rest = [(value, 0) for value in [*reversed(methods), dataset]]
    seen: dict[int, Any] = {id(generator): generator for generator in GLOBAL_GENERATORS}
    while rest and len(seen) < _MOST_VISITED:
        value, depth = rest.pop()
        if value is None or isinstance(value, WITHOUT_PARTS) or id(value) in seen or depth > MAX_DEPTH:
            continue
        seen[id(value)] = value
        if seeder_of(value) is not None:
            yield value
            continue
        try:
            parts = [*parts_of(value)]
        except Exception:
            continue
        rest += [(part, depth + 1) for part in reversed(parts)]


def _name(generator: Any) -> str:
    module = type(generator).__module__.partition(".")[0]
    return f"a {module if module != 'random' else 'Python'} {type(generator).__name__} held by the data set"


def _digest(generator: Any) -> str:
    try:
        if isinstance(generator, torch.Generator):
            state: Any = generator.get_state() if generator.device.type == "cpu" else None
        elif isinstance(generator, np.random.RandomState):
            state = generator.get_state(legacy=False)
        elif isinstance(generator, np.random.Generator):
            state = generator.bit_generator.state
        elif isinstance(generator, np.random.BitGenerator):
            state = generator.state
        else:
            state = generator.getstate()
    except Exception:  # random.SystemRandom has none
        state = None
    return "" if state is None else hashlib.blake2b(_canonical(state), digest_size=12).hexdigest()


def _canonical(state: Any) -> bytes:
    if isinstance(state, dict):
        return b"".join(str(key).encode() + _canonical(value) for key, value in sorted(state.items()))
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()


@dataclass(slots=True)
class _Record:
    """What one process wrote of one iteration."""

    loader: int
    iteration: int
    worker_id: int
    dataset: str
    is_surely_augmentation: bool
    names: list[str]
    start: list[str]
    moved: list[bool]


def find_repeated_augmentation(directory: str | Path) -> list[str]:
    """Sentences on loaders whose random numbers repeat, each with what to do, from the files of their workers.

    Found are generators that were in the same state in several workers, or when several epochs began; and examples
    that are the same in every epoch although random numbers are drawn for them. An EchoDataLoader, whose random
    numbers are keyed on purpose, is left out.
    """
    directory = Path(directory)
    by_loader: dict[int, list[_Record]] = defaultdict(list)
    for path in sorted(directory.glob("random-*.json")):
        try:
            record = _Record(**json.loads(path.read_text()))
        except (OSError, ValueError):  # the process was killed while it wrote
            continue
        by_loader[record.loader].append(record)
    found = []
    for loader, records in sorted(by_loader.items()):
        across = _repeats(records, "worker_id", "iteration")
        epochs = _repeats(records, "iteration", "worker_id")
        found += [_across_workers(records[0], name, same) for name, same in across.items()]
        found += [_in_every_epoch(records[0], name, same) for name, same in epochs.items()]
        if not epochs and any(any(record.moved) for record in records):
            num_compared, num_equal, iterations = _compare_items(directory, loader)
            if num_compared >= _FEWEST_COMPARED and num_equal == num_compared:
                found.append(_never_changes(records[0], num_compared, iterations))
    return found


def _repeats(records: list[_Record], vary: str, fixed: str) -> dict[str, list[int]]:
    """The first values of `vary` among which a generator began in one state, `fixed` being equal, by its name."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for record in records:
        if vary == "worker_id" and record.worker_id < 0:
            continue
        for at, (name, start, moved) in enumerate(zip(record.names, record.start, record.moved, strict=True)):
            if moved and start:
                groups[name, getattr(record, fixed), at, start].append(getattr(record, vary))
    found: dict[str, list[int]] = {}
    for (name, *_), values in groups.items():
        if len(set(values)) > 1:
            found.setdefault(name, sorted(set(values)))
    return found


def _compare_items(directory: Path, loader: int) -> tuple[int, int, list[int]]:
    """Of the indices seen in several iterations: how many, how many of them with one hash only, in which."""
    hashes: dict[int, dict[int, float]] = defaultdict(dict)
    for path in sorted(directory.glob(f"items-{loader}-*.rows")):
        try:
            header, rows = read_rows(path)
        except (OSError, ValueError):
            continue
        for index, value in rows:
            hashes[int(index)].setdefault(header["iteration"], value)
    compared = [seen for seen in hashes.values() if len(seen) > 1]
    num_equal = sum(len(set(seen.values())) == 1 for seen in compared)
    return len(compared), num_equal, sorted({iteration for seen in compared for iteration in seen})


def _across_workers(record: _Record, name: str, workers: list[int]) -> str:
    return (
        f"Identical augmentation across workers: {name} ({record.dataset}) began in the same state in workers "
        f"{_listed(workers)}, which therefore draw the same random numbers{_doubt(record)}. {_remedy(name)}"
    )


def _in_every_epoch(record: _Record, name: str, iterations: list[int]) -> str:
    return (
        f"Identical augmentation in every epoch: {name} ({record.dataset}) was in the same state when iterations "
        f"{_listed(iterations)} began, which therefore draw the same random numbers{_doubt(record)}. "
        f"{_remedy(name)}"
    )


def _never_changes(record: _Record, num_compared: int, iterations: list[int]) -> str:
    return (
        f"The augmentation of an example never changes: random numbers are drawn, but all {num_compared} examples "
        f"of {record.dataset} that were looked at are the same in iterations {_listed(iterations)}. Cache before "
        "the random transforms and not after them, and do not seed by the index alone: add the epoch to the seed"
    )


def _doubt(record: _Record) -> str:
    return "" if record.is_surely_augmentation else " (a bug if they are drawn for augmentation)"


def _remedy(name: str) -> str:
    if "held" in name:
        return (
            "A worker begins with a copy of it. Seed it in worker_init_fn from torch.initial_seed(), which differs "
            "for each worker and epoch, or draw from torch's global generator, which torch seeds so"
        )
    return (
        "Do not seed it with the same number in each worker or epoch: without a seed of yours torch gives each its "
        "own; for repeatable runs seed once, at the start"
    )


def _listed(numbers: list[int]) -> str:
    *head, last = map(str, numbers[:8])
    return f"{', '.join(head)} and {last}" if len(numbers) <= 8 else f"{', '.join([*head, last])} and more"
