"""The Transformer of the two texts: pre-norm decoder layers on bytes."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from accuracy_models import Decoder, Embedding
from torch import Tensor, nn

from stretto.study import MakeLoader, Settings
from workloads.common import Evaluate, Rows, fresh_batches, train_updates
from workloads.corpora import Text

VOCABULARY = 128  # ASCII
WARM_UP = 50
"""Updates; without it AdamW stays with the frequencies of characters for a tenth of the budget."""


def make_model(length: int, width: int, num_layers: int) -> nn.Module:
    """int64 [B, T <= length] -> float32 [B, T, 128]; weights from torch's present random state."""
    return nn.Sequential(
        Embedding(VOCABULARY, length, width),
        *(Decoder(width) for _ in range(num_layers)),
        nn.LayerNorm(width),
        nn.Linear(width, VOCABULARY),
    )


def cross_entropy(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean over uint8 [B, T + 1], in nats a byte."""
    rows = rows.long()
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train_on(
    text: Text,
    model: nn.Module,
    settings: Settings,
    make_loader: MakeLoader,
    evaluate_every: int,
) -> Iterator[Evaluate | None]:
    """AdamW; evaluates the cross-entropy on the test rows, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, betas=(0.9, 0.98), weight_decay=0.01)

    def evaluate() -> float:
        losses = [cross_entropy(model, some).item() * len(some) for some in text.test.split(64)]
        return sum(losses) / len(text.test)

    batches = make_loader(fresh_batches(Rows(text.train), settings.batch_size), None)
    return train_updates(
        settings,
        batches,
        model,
        optimizer,
        lambda batch: cross_entropy(model, batch[0]),
        evaluate,
        evaluate_every,
        warm_up=WARM_UP,
    )
