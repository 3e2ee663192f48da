"""Plain training loops of many forms, one after the other; for each a line of JSON says what it did."""

import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

EXAMPLES, BATCH, EPOCHS = 96, 4, 3


class Rows(Dataset):
    """Example i is [i, noise]; it takes a while, so that a loop waits for it."""

    pause_s = 0.0005

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        noise = torch.randn(1, generator=torch.Generator().manual_seed(index))
        return torch.cat([torch.tensor([float(index)]), noise])


class Plain(Rows):
    """Takes no time: there are many."""

    pause_s = 0.0


class Left(Rows): ...


class Right(Rows): ...


class Stateful(Rows): ...


class Spawned(Rows): ...


class Endless(Rows): ...


class Gan(Rows): ...


class Lbfgs(Rows): ...


class MultiEpochs(Rows): ...


class Generator(Rows): ...


class Renewed(Rows): ...


class Held(Rows):
    """For validation."""

    def __len__(self) -> int:
        return 10


class MultiEpochsLoader(DataLoader):
    """Keeps its workers, as timm's does: its iterator is made once, over a sampler without end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Forever:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Doubling(DataLoader):
    """Changes each batch on its way."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield torch.cat([batch[:, :1], 2 * batch[:, 1:]], dim=1)


class Run:
    """A model with what is counted of its training."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **kwargs: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = make(self.model.parameters(), lr=0.01, **kwargs)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.9)
        self.losses: list[float] = []
        self.used: list[int] = []
        self.epochs: list[int] = []
        self.seen: list[list[int]] = []
        self.aligned = True

    def update(self, batch: torch.Tensor) -> None:
        self.used += [int(index) for index in batch[:, 0].tolist()]

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (self.model(batch[:, 1:]) - 1).square().mean()
            loss.backward()
            return loss

        self.losses.append(self.optimizer.step(closure).item())
        self.scheduler.step()

    def epoch(self, loader: Any) -> None:
        before = len(self.losses)
        for batch in loader:
            self.update(batch)
        self.epochs.append(len(self.losses) - before)

    def validate(self, loader: Any) -> None:
        with torch.no_grad():
            self.seen.append([int(index) for batch in loader for index in batch[:, 0].tolist()])

    def report(self, name: str, **more: int) -> None:
        weights = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        numbers = [*self.losses, *weights.tolist(), *self.used]
        said = {
            "name": name,
            "updates": len(self.losses),
            "epochs": self.epochs,
            "lr": self.scheduler.get_last_lr()[0],
            "seen": self.seen,
            "aligned": self.aligned,
            "examples": len(set(self.used)),
            **more,
            "hash": hashlib.sha256(json.dumps(numbers).encode()).hexdigest(),
        }
        print(json.dumps(said))


def plain() -> Run:
    run = Run(momentum=0.9)
    loader, held = DataLoader(Plain(), BATCH, shuffle=True), DataLoader(Held(), 4)
    for epoch in range(60):
        run.epoch(loader)
        if epoch % 20 == 0:
            run.validate(held)
            run.validate(DataLoader(loader.dataset, 8))
    return run


def zipped() -> Run:
    run = Run()
    left, right = (
        DataLoader(rows, BATCH, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(7))
        for rows in (Left(), Right())
    )
    for _ in range(EPOCHS):
        before = len(run.losses)
        for one, other in zip(left, right, strict=True):
            run.aligned &= torch.equal(one, other)
            run.update(one)
        run.epochs.append(len(run.losses) - before)
    return run


def stateful() -> Run:
    run = Run()
    loader = StatefulDataLoader(Stateful(), BATCH, shuffle=True, num_workers=1)
    held = StatefulDataLoader(Held(), 4)
    for _ in range(EPOCHS):
        run.epoch(loader)
        run.validate(held)
    return run


def spawned() -> Run:
    run = Run()
    loader = DataLoader(
        Spawned(), BATCH, shuffle=True, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    for _ in range(EPOCHS):
        run.epoch(loader)
    return run


def endless() -> Run:
    run = Run()
    loader = DataLoader(Endless(), BATCH, shuffle=True)
    batches = iter(loader)
    for step in range(60):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        run.update(batch)
        if step == 30:
            run.validate(loader)
    return run


def gan() -> Run:
    run = Run()
    critic = torch.nn.Linear(1, 1)
    adam = torch.optim.Adam(critic.parameters())
    loader = DataLoader(Gan(), BATCH, shuffle=True, persistent_workers=True, num_workers=1)
    for _ in range(EPOCHS):
        before = len(run.losses)
        for batch in loader:
            adam.zero_grad()
            critic(batch[:, 1:]).mean().backward()
            adam.step()
            run.update(batch)
        run.validate(loader)
        run.epochs.append(len(run.losses) - before)
    return run


def lbfgs() -> Run:
    run = Run(torch.optim.LBFGS, max_iter=3)
    loader = DataLoader(Lbfgs(), BATCH, shuffle=True)
    for _ in range(EPOCHS):
        run.epoch(loader)
    return run


def multi_epochs() -> Run:
    run = Run()
    loader = MultiEpochsLoader(MultiEpochs(), BATCH, shuffle=True, num_workers=1)
    for _ in range(EPOCHS):
        run.epoch(loader)
    return run


def generator() -> Run:
    run = Run()
    loader = Doubling(Generator(), BATCH, shuffle=True, persistent_workers=True, num_workers=1)
    for _ in range(EPOCHS):
        run.epoch(loader)
        run.validate(loader)
    return run


def renewed() -> Run:
    run = Run()
    for _ in range(EPOCHS):
        run.epoch(DataLoader(Renewed(), BATCH, shuffle=True, num_workers=1))
    return run


LOOPS = [renewed, plain, zipped, stateful, spawned, endless, gan, lbfgs, multi_epochs, generator]

if __name__ == "__main__":
    import light  # noqa: F401  (only where this is the script)

    torch.set_num_threads(1)
    for loop in LOOPS:
        if len(sys.argv) < 2 or loop.__name__ in sys.argv[1:]:
            torch.manual_seed(0)
            run = loop()
            more = {"workers": len(multiprocessing.active_children())} if loop is renewed else {}
            run.report(loop.__name__, **more)
