"""Trains in processes of its own: spawned, forked by multiprocessing, and forked by hand."""

import multiprocessing
import os

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

EXAMPLES = torch.arange(32.0).reshape(32, 1)


def train(epochs: int) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loader = DataLoader(EXAMPLES, 2)
    for _ in range(epochs):
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()


def spawned(rank: int) -> None:
    train(1 + rank)


if __name__ == "__main__":
    import light  # noqa: F401  (only where this is the script)

    torch.set_num_threads(1)
    torch.multiprocessing.spawn(spawned, nprocs=1)
    process = multiprocessing.get_context("fork").Process(target=train, args=(2,))
    process.start()
    process.join()
    if (pid := os.fork()) == 0:
        train(3)
        os._exit(0)
    os.waitpid(pid, 0)
    idle = multiprocessing.get_context("fork").Process(target=print)
    idle.start()
    idle.join()
