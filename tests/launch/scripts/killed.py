"""Trains for three updates, then is killed."""

import os
import signal

import light  # noqa: F401
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for at, batch in enumerate(DataLoader(torch.ones(8, 1), 2)):
    model(batch).sum().backward()
    optimizer.step()
    if at == 2:
        os.kill(os.getpid(), signal.SIGKILL)
