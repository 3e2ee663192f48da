"""What Lightning's DDP makes of EchoDataLoaders on two ranks. Run by torchrun.py."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, SequentialSampler

from stretto import EchoDataLoader
from tests.echo.workers.scripts.common import Rows, add_noise, echo_loader, make_stream, write


class Model(lightning.LightningModule):
    """Remembers what it was given, by epoch; saves a checkpoint after update `save_after`."""

    def __init__(self, path: Path | None = None, save_after: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.epochs: dict[int, list[Any]] = {}
        self.path = path
        self.save_after = save_after
        self.loader: Any = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.epochs.setdefault(self.current_epoch, []).append(batch.tolist())
        loss: torch.Tensor = self.layer(0.0 * batch).sum()
        return loss

    def on_train_batch_end(self, *args: object) -> None:
        if self.trainer.global_step == self.save_after:
            self.trainer.save_checkpoint(self.path)

    def on_train_end(self) -> None:
        self.loader = self.trainer.train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)

    def seen(self) -> dict[str, Any]:
        loader = self.loader
        stats = loader.stats()
        return {
            "epochs": list(self.epochs.values()),
            "class": type(loader).__name__,
            "dataset": [type(loader.dataset).__name__, type(loader.dataset.dataset).__name__],
            "samplers": [type(loader.batch_sampler.sampler).__name__, type(loader.sampler).__name__],
            "factor": loader.factor,
            "batch_size": loader.batch_size,
            "len": len(loader),
            "reads": stats.reads,
            "reread": stats.reread,
        }


class WithHook(Model):
    """Makes its loader itself, and says the batch size by position."""

    def train_dataloader(self) -> EchoDataLoader:
        return EchoDataLoader(Rows(61), 8, True, factor=2.5, seed=3, augment=add_noise, num_workers=1)


class SavesEpochs(Model):
    """Saves a checkpoint at the end of the first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)


class Validated(Model):
    num_validated = 0

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.num_validated += 1


def fit(model: Model, *arguments: Any, **settings: Any) -> Model:
    """Two epochs in this process."""
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False, **quiet).fit(model, *arguments, **settings)
    return model


def trainer(max_epochs: int = 2) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def resumed(make: Any, path: Path) -> list[Any]:
    """Batches of an uninterrupted run after its seventh, and of one that starts from the checkpoint there."""
    model = Model(path, 7)
    trainer(max_epochs=1).fit(model, make())
    again = Model()
    trainer(max_epochs=1).fit(again, make(), ckpt_path=path, weights_only=False)
    return [model.epochs[0][7:], again.epochs[0]]


def given_batch_sampler() -> str:
    loader = EchoDataLoader(Rows(64), batch_sampler=BatchSampler(SequentialSampler(Rows(64)), 8, False))
    try:
        trainer().fit(Model(), loader)
    except (TypeError, ValueError, MisconfigurationException) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    folder = Path(sys.argv[2])
    passed, hook = Model(), WithHook()
    trainer(max_epochs=3).fit(passed, echo_loader(61, 2))
    trainer().fit(hook)
    results = {
        "passed": passed.seen(),
        "hook": hook.seen(),
        "resumed": resumed(lambda: echo_loader(61, 2), folder / "map.ckpt"),
        "stream": resumed(make_stream, folder / "stream.ckpt"),
        "given batch_sampler": given_batch_sampler(),
    }
    write(results)


if __name__ == "__main__":
    main()
