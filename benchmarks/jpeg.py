"""Examples a second from JPEG files, where decoding takes longest: EchoDataLoader against torch's DataLoader.

The job: 2,382 photographs of 500x375 (photos.py); read the file, decode with Pillow, then albumentations' random
crop to 224x224, flip and normalise, to a float32 tensor; 2 workers, batches of 64. The loop just takes the batches.
A turn is whole epochs, 4 uses of each photograph, with workers that live on, so that filling, draining and the
order of uses are in it and starting processes is not.

What can be expected at factor e follows from CPU seconds an example, with

    d   reading and decoding, up to the echo point     (this process alone, a sample of the same photographs)
    a   augmenting                                     (likewise)
    c   everything else: index queues, collating into shared memory, the way to this process, freeing
        (CPU time of workers and this process, in a plain DataLoader over examples that are ready)

The plain loader spends d + a + c an example, echoing after decoding d/e + a + c. On cores that are all busy

    expected = plain * (d + a + c) / (d/e + a + c)

All of it is measured in the same rounds. What the loaders really spent stands beside it: CPU time of workers and
this process, an example.

That echoing costs nothing where nothing is echoed, EchoDataLoader(factor=1) shows beside the plain loader. The
other insertion points of the same job: after augmentation (all uses are equal), and stretto.echo(..., unit="batch")
around the plain loader (each batch comes four times).
"""

import io
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from harness import Report, Spread, parse_arguments, ratio, take_turns, write_table
from photos import generate, photos, photos_made_before
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler

import stretto

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it would look for a newer version when imported
import albumentations

NUM_WORKERS, FACTOR, BUFFER = 2, 4, "512MiB"
_TRANSFORM = albumentations.Compose(
    [albumentations.RandomCrop(224, 224), albumentations.HorizontalFlip(), albumentations.Normalize()]
)


@dataclass(frozen=True, slots=True)
class Job:
    """What all competitors do."""

    paths: Sequence[Path]
    batch_size: int
    num_sampled: int
    """Photographs that d and a are measured on."""


def read(path: Path) -> bytes:
    return path.read_bytes()


def decode(content: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def augment(image: np.ndarray[Any, Any]) -> torch.Tensor:
    """[height, width, 3] uint8 -> [3, 224, 224] float32."""
    return torch.from_numpy(np.ascontiguousarray(_TRANSFORM(image=image)["image"].transpose(2, 0, 1)))


@dataclass(slots=True)
class Loop:
    """Takes the batches of a loader with persistent workers; each call returns examples a second over one epoch."""

    loader: DataLoader[Any]
    cpu_ms: list[float] = field(default_factory=list)
    """CPU milliseconds an example of workers and this process, for each call but the first, which starts them."""

    def __call__(self) -> float:
        was_running = self.loader._iterator is not None
        cpu, start = self._cpu_s(), time.perf_counter()
        count = sum(len(batch) for batch in self.loader)
        seconds = time.perf_counter() - start
        if was_running:
            self.cpu_ms.append(1e3 * (self._cpu_s() - cpu) / count)
        return count / seconds

    def _cpu_s(self) -> float:
        workers = self.loader._iterator._workers if self.loader._iterator else []
        times = [psutil.Process(worker.pid).cpu_times() for worker in workers]
        return time.process_time() + sum(of.user + of.system for of in times)


def cpu_of(function: Callable[[Any], Any], arguments: Sequence[Any]) -> Callable[[], float]:
    """CPU milliseconds of this process for each call of `function`."""

    def measure() -> float:
        start = time.process_time()
        for argument in arguments:
            function(argument)
        return 1e3 * (time.process_time() - start) / len(arguments)

    return measure


def measure_job(report: Report, job: Job) -> None:
    dataset = stretto.StagedDataset(job.paths, read=read, decode=decode, augment=augment)
    common = {"batch_size": job.batch_size, "num_workers": NUM_WORKERS, "persistent_workers": True}
    once = RandomSampler(job.paths, num_samples=len(job.paths))
    as_often = RandomSampler(job.paths, num_samples=FACTOR * len(job.paths))  # pass after pass, without a pause
    echoing = {"buffer": BUFFER, "factor": FACTOR, **common}

    sample = [job.paths[at] for at in np.random.default_rng(0).permutation(len(job.paths))[: job.num_sampled]]
    images = [decode(read(path)) for path in sample]
    ready = [augment(image) for image in images[:256]]
    is_ready = RandomSampler(ready, num_samples=FACTOR * len(job.paths))

    loops = {
        "ready": Loop(DataLoader(ready, sampler=is_ready, **common)),
        "plain": Loop(DataLoader(dataset, sampler=as_often, **common)),
        "e=1": Loop(stretto.EchoDataLoader(dataset, sampler=as_often, factor=1, echo_after="decode", **common)),
        "before": Loop(stretto.EchoDataLoader(dataset, sampler=once, echo_after="decode", **echoing)),
        "after": Loop(stretto.EchoDataLoader(dataset, sampler=once, **echoing)),
    }
    competitors: dict[str, Callable[[], float]] = {
        "d": cpu_of(lambda path: decode(read(path)), sample),
        "a": cpu_of(augment, images),
        **loops,
    }
    plain = DataLoader(dataset, sampler=once, **common)
    with stretto.echo(plain, FACTOR, unit="batch", copy=False, carry_over=False, buffer=BUFFER) as batches:

        def of_batches() -> float:
            start = time.perf_counter()
            count = sum(len(batch) for batch in batches)
            return count / (time.perf_counter() - start)

        rates = take_turns({**competitors, "batch": of_batches}, report.arguments.rounds)
    report_job(report, rates, {name: loop.cpu_ms for name, loop in loops.items()})


def report_job(report: Report, rates: dict[str, list[float]], cpu_ms: dict[str, list[float]]) -> None:
    parts = list(zip(rates["d"], rates["a"], cpu_ms["ready"], strict=True))
    speedups = [(d + a + c) / (d / FACTOR + a + c) for d, a, c in parts]
    expected = [plain * speedup for plain, speedup in zip(rates["plain"], speedups, strict=True)]
    for what, values in (
        ("d: reading and decoding", rates["d"]),
        ("a: augmenting", rates["a"]),
        ("c: collating and transport", cpu_ms["ready"]),
        ("spent by DataLoader, to compare with d + a + c", cpu_ms["plain"]),
        ("spent by EchoDataLoader(factor=1)", cpu_ms["e=1"]),
        ("spent by EchoDataLoader, before augmentation", cpu_ms["before"]),
        ("spent by EchoDataLoader, after augmentation", cpu_ms["after"]),
    ):
        report.add(f"CPU, {what}", Spread.of(values), "ms/example")
    report.add("(d + a + c) / (d/4 + a + c)", Spread.of(speedups), "")
    for what, name, bar in (
        ("EchoDataLoader, factor=1", "e=1", 0.97),
        ("EchoDataLoader, before augmentation", "before", 2.2),
        ("EchoDataLoader, after augmentation", "after", None),
        ('stretto.echo, unit="batch", copy=False', "batch", None),
    ):
        report.add(what, Spread.of(rates[name]), "examples/s")
        report.add(f"{what} / DataLoader", ratio(rates[name], rates["plain"]), "", at_least=bar)
    report.add("DataLoader", Spread.of(rates["plain"]), "examples/s")
    report.add("before augmentation / expected", ratio(rates["before"], expected), "", at_least=0.85)


def table(results: list[dict[str, Any]]) -> str:
    """The insertion points beside each other, in Markdown."""
    of = {result["what"]: result for result in results}
    lines = [
        "| echo point | e | examples a second | beside no echo (over the rounds) | CPU, ms an example |",
        "|---|---:|---:|---:|---:|",
    ]
    for title, factor, what, cpu in (
        ("no echo: DataLoader", 1, "DataLoader", "DataLoader, to compare with d + a + c"),
        ("no echo: EchoDataLoader", 1, "EchoDataLoader, factor=1", "EchoDataLoader(factor=1)"),
        (
            "before augmentation",
            FACTOR,
            "EchoDataLoader, before augmentation",
            "EchoDataLoader, before augmentation",
        ),
        ("after augmentation", FACTOR, "EchoDataLoader, after augmentation", "EchoDataLoader, after augmentation"),
        ("batches, after the loader", FACTOR, 'stretto.echo, unit="batch", copy=False', ""),
    ):
        cells = [title, str(factor), f"{of[what]['median']:,.0f}", "1", ""]
        if beside := of.get(f"{what} / DataLoader"):
            cells[3] = f"{beside['median']:.2f} ({beside['low']:.2f} .. {beside['high']:.2f})"
        if spent := of.get(f"CPU, spent by {cpu}"):
            cells[4] = f"{spent['median']:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=8)
    report = Report("jpeg", arguments)
    torch.set_num_threads(1)
    if not arguments.quick:
        measure_job(report, Job(photos(), batch_size=64, num_sampled=400))
    elif (paths := photos_made_before()) is not None:
        measure_job(report, Job(paths[::100], batch_size=4, num_sampled=5))
    else:
        report.note("the photographs are not here: generated pictures stand in for them")
        with tempfile.TemporaryDirectory() as directory:
            measure_job(report, Job(generate(Path(directory), 24), batch_size=4, num_sampled=5))
    report.finish()
    if not arguments.quick and arguments.out is None:
        write_table("docs/where.md", "jpeg", table(report.results))


if __name__ == "__main__":
    main()
