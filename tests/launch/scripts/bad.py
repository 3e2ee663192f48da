"""Scripts of which no training loader can be recognised, by name."""

import sys

import light  # noqa: F401
import torch
from torch.utils.data import DataLoader

data = torch.arange(12.0).reshape(12, 1)
model = torch.nn.Linear(1, 1)


class Lion:
    """An optimizer that is not torch's."""

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


def crash() -> None:
    raise RuntimeError("no data to be found")


def no_loader() -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(data).sum().backward()
        optimizer.step()


def no_optimizer() -> None:
    for batch in DataLoader(data, 4):
        model(batch)


def foreign() -> None:
    optimizer = Lion()
    for batch in DataLoader(data, 4):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


def anew() -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, 4, shuffle=True)
    for _ in range(5):
        model(next(iter(loader))).sum().backward()
        optimizer.step()


globals()[sys.argv[1]]()
