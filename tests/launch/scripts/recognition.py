"""Loops that are not to be mistaken; for each a line of JSON says what it saw."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stretto

EXAMPLES, BATCH = 48, 4


class Rows(Dataset):
    """Example i is [i]."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Broken(Rows): ...


class Checked(Rows): ...


class Trained(Rows): ...


class Odd(Rows): ...


class ByHand(Rows): ...


class InWorkers(Rows): ...


class Failing(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise OSError(f"example {index} cannot be read")


class Ragged(Rows):
    """Every batch is padded to another length."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index // BATCH,), float(index))


class LaterRagged(Rows):
    """Like `Ragged` from the eleventh batch on."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + max(0, index // BATCH - 10),), float(index))


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index)]) for index in range(EXAMPLES))


class Peculiar:
    """A batch that does not like to be looked at."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = torch.stack(rows)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not known")


def train(loader: Any, epochs: int = 1, stop_after: int | None = None) -> dict[str, Any]:
    """Updates in each epoch, and the examples that were used."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    updates, used = [], []
    for _ in range(epochs):
        updates.append(0)
        for batch in loader:
            rows = batch.rows if isinstance(batch, Peculiar) else batch
            used += [int(index) for index in rows[:, 0]]
            optimizer.zero_grad()
            model(rows[:, :1]).mean().backward()
            optimizer.step()
            updates[-1] += 1
            if updates[-1] == stop_after:
                break
    return {"updates": updates, "used": used}


def broken() -> dict[str, Any]:
    return train(DataLoader(Broken(), BATCH, num_workers=1, persistent_workers=True), 4, stop_after=5)


def checked() -> dict[str, Any]:
    """A validation with gradients, without a step, before and between epochs."""
    trained, held, seen = DataLoader(Trained(), BATCH), DataLoader(Checked(), BATCH), []
    for _ in range(3):
        seen.append([int(index) for batch in held for index in batch[:, 0]])
        said = train(trained)
    return {**said, "seen": seen}


def ragged() -> dict[str, Any]:
    return train(DataLoader(Ragged(), BATCH), 3)


def later_ragged() -> dict[str, Any]:
    return train(DataLoader(LaterRagged(), BATCH), 3)


def stream() -> dict[str, Any]:
    return train(DataLoader(Stream(), BATCH), 1)


def odd() -> dict[str, Any]:
    return train(DataLoader(Odd(), BATCH, collate_fn=Peculiar), 2)


def by_hand() -> dict[str, Any]:
    with stretto.echo(DataLoader(ByHand(), BATCH), 3) as loader:
        return train(loader, 2)


def in_workers() -> dict[str, Any]:
    with_workers = stretto.EchoDataLoader(InWorkers(), BATCH, factor=3, num_workers=1)
    return train(with_workers, 2)


LOOPS = [broken, checked, ragged, later_ragged, stream, odd, by_hand, in_workers]

if __name__ == "__main__":
    import light  # noqa: F401  (only where this is the script)

    torch.set_num_threads(1)
    for loop in LOOPS:
        torch.manual_seed(0)
        print(json.dumps({"name": loop.__name__, **loop()}))
    left = iter(DataLoader(Rows(), BATCH))  # alive at the end
    next(left)
    if len(sys.argv) > 1:
        train(DataLoader(Failing(), BATCH))
