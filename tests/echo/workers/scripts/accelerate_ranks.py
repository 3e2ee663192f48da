"""What two processes see of loaders that Accelerate prepared. Run by torchrun.py."""

from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

from stretto import EchoDataLoader, echo_plan
from tests.echo.workers.scripts.common import Slow, Stream, add_noise, echo_loader, finish, is_loader, rank, write


def rows_of(loader: Any) -> list[list[list[int]]]:
    return [batch.tolist() for batch in loader]


def epochs(n: int, num_workers: int, **arguments: Any) -> dict[str, Any]:
    """Three epochs, and the rest of the second from a state."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(echo_loader(n, num_workers, **arguments))
    plan = echo_plan(loader)
    seen = [rows_of(loader)]
    second, state = [], {}
    for number, batch in enumerate(loader, 1):
        second.append(batch.tolist())
        if number == 3:
            state = plan.state_dict()
    seen += [second, rows_of(loader)]
    stats = plan.stats()
    again = accelerator.prepare(echo_loader(n, num_workers, **arguments))
    echo_plan(again).load_state_dict(state)
    return {
        "is_loader": is_loader(loader),
        "dataset": [type(loader.dataset).__name__, type(loader.dataset.dataset).__name__],
        "len": len(loader),
        "epochs": seen,
        "position": state["num_batches"],
        "rest": rows_of(again),
        "third again": rows_of(again),
        "reads": stats.reads,
        "reread": stats.reread,
        "uses": stats.uses,
        "num_epochs": stats.epochs,
    }


def epochs_of_auto() -> dict[str, Any]:
    """Reading takes long, so the factor may rise."""
    loader = Accelerator(cpu=True).prepare(
        EchoDataLoader(Slow(300, 0.001), 8, num_workers=2, factor="auto", max_factor=3)
    )
    plan = echo_plan(loader)
    seen = [rows_of(loader), rows_of(loader)]
    return {"epochs": seen, "factor": plan.stats().factor, "in force": plan.state_dict()["factor"]}


def skipped() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)  # what Accelerate seeds a sampler with
    loader = accelerator.prepare(echo_loader())
    torch.manual_seed(1)
    first = rows_of(accelerator.prepare(echo_loader()))
    rest = skip_first_batches(loader, 4)
    seen = []
    position = 0
    for number, batch in enumerate(rest, 1):
        seen.append(batch.tolist())
        if number == 3:
            position = echo_plan(rest).state_dict()["num_batches"]
    return {"first": first, "rest": seen, "position": position, "second": rows_of(loader)}


def split() -> str:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    try:
        rows_of(accelerator.prepare(echo_loader()))
    except ValueError as error:
        return str(error)
    return ""


def stream_dealt_out() -> str:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    try:
        rows_of(accelerator.prepare(EchoDataLoader(Stream(64), 8)))
    except ValueError as error:
        return str(error)
    return ""


def dispatched(n: int, num_workers: int) -> dict[str, Any]:
    """Process 0 reads, and sends the others their part."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(echo_loader(n, num_workers))
    plan = echo_plan(loader)
    seen, state = [], {}
    for number, batch in enumerate(loader, 1):
        seen.append(batch.tolist())
        if number == 5:
            state = plan.state_dict()
    again = accelerator.prepare(echo_loader(n, num_workers))
    echo_plan(again).load_state_dict(state)
    reads = plan.stats().reads
    return {"rows": seen, "reads": reads, "rest": rows_of(again), "second": rows_of(loader), "len": len(loader)}


def stream_dispatched() -> dict[str, Any]:
    """Accelerate's default for iterable data sets."""
    loader = Accelerator(cpu=True).prepare(EchoDataLoader(Stream(64), 8, augment=add_noise))
    return {"epochs": [rows_of(loader), rows_of(loader)]}


def accumulated() -> list[bool]:
    """Whether Accelerate steps, batch by batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, echo_loader(61))
    steps = []
    for _ in loader:
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
    return steps


def unseeded() -> list[list[list[list[int]]]]:
    """Ranks that seed themselves differently still share one order."""
    torch.manual_seed(rank())
    loader = Accelerator(cpu=True).prepare(echo_loader(64, factor=2))
    return [rows_of(loader), rows_of(loader)]


def metrics(factor: float) -> list[int]:
    """Rows that Accelerate gathers for metrics, by batch."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(echo_loader(61, factor=factor))
    return [len(accelerator.gather_for_metrics(batch)) for batch in loader]


def main() -> None:
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    results: dict[str, Any] = {}
    for n in (64, 61):
        for num_workers in (0, 2):
            results[f"{n} {num_workers}"] = epochs(n, num_workers)
    results["2.5"] = epochs(61, 2, factor=2.5)
    results["drop_last"] = epochs(61, 0, drop_last=True)
    results["1"] = epochs(61, 0, factor=1)
    results["auto"] = epochs_of_auto()
    results["skipped"] = skipped()
    results["split"] = split()
    results["stream"] = stream_dealt_out()
    results["dispatched"] = dispatched(61, 2)
    results["stream dispatched"] = stream_dispatched()
    results["accumulated"] = accumulated()
    results["unseeded"] = unseeded()
    results["metrics"] = {"1": metrics(1), "3": metrics(3)}
    torch.manual_seed(1)  # as Accelerate asks for
    loader = Accelerator(cpu=True, dataloader_config=seedable).prepare(echo_loader(64, factor=2))
    results["seedable"] = [rows_of(loader), rows_of(loader)]
    write(results)
    finish()


if __name__ == "__main__":
    main()
