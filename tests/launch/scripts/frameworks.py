"""Lightning, Accelerate and the Hugging Face Trainer, one after the other; for each a line of JSON."""

import hashlib
import json
import logging
import time
import warnings
from typing import Any

import lightning
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

BATCH = 4


class Rows(Dataset):
    """Example i is {"x": noise, "labels": i}."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.0005)
        noise = torch.randn(1, generator=torch.Generator().manual_seed(index))
        return {"x": noise, "labels": torch.tensor(index)}


class Held(Rows):
    """For validation."""


class Model(torch.nn.Module):
    """Remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.used: list[int] = []
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        (self.used if self.training else self.seen).extend(int(index) for index in labels.tolist())
        return {"loss": (self.layer(x) - 1).square().mean(), "logits": self.layer(x)}


def report(name: str, model: Model, lr: float, updates: int, **more: Any) -> None:
    weights = [value for parameter in model.parameters() for value in parameter.reshape(-1).tolist()]
    said = {
        "name": name,
        "updates": updates,
        "batches": len(model.used) // BATCH,
        "lr": lr,
        "seen": model.seen,
        "hash": hashlib.sha256(json.dumps([*weights, *model.used]).encode()).hexdigest(),
        **more,
    }
    print(json.dumps(said))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.validations = 0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch)["loss"]

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.model(**batch)

    def on_validation_end(self) -> None:
        self.validations += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OfLightning(Rows): ...


class OfAccelerate(Rows): ...


class OfTrainer(Rows): ...


def with_lightning() -> None:
    """Validation twice an epoch, and two batches of it before the first."""
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        val_check_interval=0.5,
        num_sanity_val_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module, DataLoader(OfLightning(96), BATCH, shuffle=True, num_workers=1), DataLoader(Held(12), BATCH)
    )
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    report("lightning", module.model, lr, trainer.global_step, validations=module.validations)


def with_accelerate() -> None:
    """Gradients of two batches for each update; an odd number of batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    loader, held = DataLoader(OfAccelerate(100), BATCH, shuffle=True), DataLoader(Held(12), BATCH)
    model, optimizer, loader, held, schedule = accelerator.prepare(model, optimizer, loader, held, schedule)
    updates = 0
    for _ in range(3):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
        model.eval()
        with torch.no_grad():
            for batch in held:
                model(**batch)
    report("accelerate", model, schedule.get_last_lr()[0], updates)


def with_trainer() -> None:
    """A number of updates instead of epochs; an evaluation now and then."""
    model = Model()
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=60,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=OfTrainer(96), eval_dataset=Held(12))
    trainer.train()
    report("trainer", model, trainer.optimizer.param_groups[0]["lr"], trainer.state.global_step)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for train in (with_lightning, with_accelerate, with_trainer):
        torch.manual_seed(0)
        train()
