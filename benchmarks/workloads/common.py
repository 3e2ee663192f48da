"""What the workloads share: the loop of updates, batches of rows, and evaluations at a pace in examples."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from stretto.study import Settings

Evaluate = Callable[[], float]


class Rows(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length as a data set that hands out a whole batch at once."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The rows at `indices`, of each tensor."""
        at = torch.as_tensor(indices)
        return tuple(tensor[at] for tensor in self._tensors)


def fresh_batches(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """Shuffled batches of a data set whose `__getitems__` makes a batch, before augmentation."""
    return DataLoader(dataset, batch_size, shuffle=True, drop_last=True, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def train_updates(
    settings: Settings,
    batches: Iterable[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    evaluate: Evaluate,
    evaluate_every: int,
    warm_up: int = 0,
) -> Iterator[Evaluate | None]:
    """Train on one batch after the other; yields `evaluate` when it is time for it, else None.

    `evaluate_every` is in examples used, so that evaluations take the same part of the time at every batch size.
    Over the first `warm_up` updates the rate rises to that of the settings. `evaluate` finds the model in
    evaluation mode, and is called without gradients. Raises FloatingPointError for a loss that is not finite.
    """
    # The study runs as many processes as there are cores.
    torch.set_num_threads(1)
    updates_between = max(1, round(evaluate_every / settings.batch_size))

    def evaluate_quietly() -> float:
        model.eval()
        with torch.inference_mode():
            return evaluate()

    for update, batch in enumerate(batches):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(update) * min(1, (update + 1) / max(1, warm_up))
        loss = loss_of(batch)
        if not loss.isfinite():
            raise FloatingPointError(f"the loss of update {update} is {loss.item()}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield evaluate_quietly if (update + 1) % updates_between == 0 else None


def percent_right(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images (float32 or uint8 [N, C, H, W]) that the model classifies as labelled."""
    outputs = [model(some) for some in images.split(500)]
    return 100 * (torch.cat(outputs).argmax(1) == labels).float().mean().item()
