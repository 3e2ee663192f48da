"""Loaders whose batches, or lengths, are not what they seem; each trains and is evaluated over, without no_grad."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import light  # noqa: F401
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

torch.set_num_threads(1)
warnings.simplefilter("error")
NUM_EXAMPLES, BATCH_SIZE, NUM_EPOCHS = 40, 4, 3
ODD_ONE = 7  # the batch that differs


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.rand(1)  # draws from the global state, in stretto's thread with an echo: that may not warn here
        return torch.full((2,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int | None) -> None:
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise RuntimeError("endless")
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((2,), float(index)) for index in range(NUM_EXAMPLES))


class Long(DataLoader[torch.Tensor]):
    def __len__(self) -> int:
        return 1000


class Changing:
    """A collate function whose batch `ODD_ONE` is another one."""

    def __init__(self, change: Any) -> None:
        self.change = change
        self.num_calls = 0

    def __call__(self, items: list[torch.Tensor]) -> Any:
        self.num_calls += 1
        batch = torch.stack(items)
        return self.change(batch) if self.num_calls == ODD_ONE else batch


class Restless(torch.Tensor):
    """Refuses to be copied."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not to be copied")

    def detach(self) -> Any:
        raise RuntimeError("not to be copied")


LOADERS: dict[str, Any] = {
    "an empty batch": lambda: DataLoader(Numbers(), BATCH_SIZE, collate_fn=Changing(lambda batch: batch[:0])),
    "a wider batch": lambda: DataLoader(
        Numbers(), BATCH_SIZE, collate_fn=Changing(lambda batch: torch.cat([batch, batch], 1))
    ),
    "only empty batches": lambda: DataLoader(
        Numbers(), BATCH_SIZE, collate_fn=lambda items: torch.stack(items)[:0]
    ),
    "generators": lambda: DataLoader(Numbers(), BATCH_SIZE, collate_fn=lambda items: (item for item in items)),
    "restless": lambda: DataLoader(
        Numbers(), BATCH_SIZE, collate_fn=lambda items: torch.stack(items).as_subclass(Restless)
    ),
    "a stream that is shorter": lambda: DataLoader(Stream(80), BATCH_SIZE),
    "a stream that is longer": lambda: DataLoader(Stream(20), BATCH_SIZE),
    "a stream without length": lambda: DataLoader(Stream(None), BATCH_SIZE),
    "a loader that is shorter": lambda: Long(Numbers(), BATCH_SIZE),
}


def to_rows(batch: Any) -> torch.Tensor:
    rows = batch if isinstance(batch, torch.Tensor) else torch.stack(list(batch))
    return rows.as_subclass(torch.Tensor)[:, :2]


def main() -> None:
    for name, make in LOADERS.items():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Length of IterableDataset")
            loader = make()
            updates, evaluated = [], []
            for _ in range(NUM_EPOCHS):
                num_updates = 0
                for batch in loader:
                    (model(to_rows(batch)).sum() * 0).backward()
                    optimizer.step()
                    num_updates += 1
                updates.append(num_updates)
                model.eval()
                evaluated.append(sorted(value for batch in loader for value in to_rows(batch)[:, 0].tolist()))
                model.train()
        print(json.dumps({"name": name, "updates": updates, "evaluated": evaluated}))


main()
