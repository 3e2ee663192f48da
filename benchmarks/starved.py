"""Training jobs that wait for their input, for advice.py and meter.py; by itself a script such as users have.

    python starved.py slow-fetch --updates 300 --out FILE     writes seconds an update, from the 20th to the last

The accelerator is emulated: a step updates a tiny model and sleeps until its deadline ("computing" multiplies
matrices instead). What makes a job slow is real: sleeping where a read waits for a store, computing where it
computes. The bursty store holds shards of 25 batches, read in order; to open one takes 50 steps.
"""

import argparse
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import stretto

B = 8
STEP_S = 12e-3
BURST, STALL_STEPS = 25, 50
FIRST_UPDATES = 20
"""Updates before the script's clock starts."""

_SIDE = 32
_PIXELS = np.random.default_rng(0).integers(0, 40, (16, 3, _SIDE, _SIDE), dtype=np.uint8)
_PACKED = [zlib.compress(pixels.tobytes()) for pixels in _PIXELS]
_NUM_PRODUCTS = 9  # of 256 x 256 matrices, about 5 ms


@dataclass(frozen=True, slots=True)
class Job:
    """A loader, and the updates that it feeds."""

    title: str
    num_workers: int
    num_batches: int
    """In an epoch."""
    batch_size: int = B
    read_s: float = 0.0
    """Seconds that the read of an example waits."""
    num_decodes: int = 1
    """How often an example is decoded: 0.3 ms for each 16."""
    num_rolls: int = 1
    """The cost of augmenting."""
    shard: int | None = None
    """Examples in a shard."""
    open_s: float = 0.0
    """Seconds that one read of a shard waits: in its middle, so that an epoch's first batch is like others."""
    is_composed: bool = False
    """Whether the data set has a `transform`, a Compose of 3, in the place of named stages."""
    step_s: float | None = STEP_S
    """None: it computes."""

    @property
    def cycle(self) -> int:
        """Fresh batches after which the pattern of the costs begins anew."""
        return 1 if self.shard is None else self.shard // self.batch_size

    def dataset(self, num_batches: int) -> Any:
        """Examples for so many batches, float32 [3, 32, 32]."""
        stages: dict[str, Any] = {
            "read": partial(read, wait_s=self.read_s, shard=self.shard, open_s=self.open_s),
            "decode": partial(decode, count=self.num_decodes),
            "augment": partial(augment, num_rolls=self.num_rolls),
        }
        indices = range(num_batches * self.batch_size)
        if self.is_composed:
            return Transformed(indices, stages["read"], Compose([stages["decode"], stages["augment"], normalise]))
        return stretto.StagedDataset(indices, **stages)

    def loader(self, num_batches: int | None = None) -> DataLoader[Any]:
        """As in the script. In order, since the bursts are of shards; for the others it makes no difference."""
        dataset = self.dataset(num_batches or self.num_batches)
        return DataLoader(dataset, batch_size=self.batch_size, num_workers=self.num_workers)


JOBS = {
    "slow-fetch": Job("slow fetch", num_workers=2, num_batches=96, read_s=9e-3),
    "slow-decode": Job("slow decode", num_workers=1, num_batches=16, num_decodes=220),
    "slow-augment": Job("slow augmentation", num_workers=1, num_batches=96, num_rolls=110),
    "bursty": Job(
        "bursty store",
        num_workers=1,
        num_batches=4 * BURST,
        read_s=0.4 * STEP_S / B,
        shard=BURST * B,
        open_s=STALL_STEPS * STEP_S,
    ),
    "no-overlap": Job("no overlap", num_workers=0, num_batches=96, read_s=4.5e-3),
}
UNHURRIED = {
    "light": Job("light loader", num_workers=2, num_batches=1 << 16, batch_size=32, is_composed=True, step_s=5e-3),
    "computing": Job(
        "compute-bound", num_workers=1, num_batches=1 << 16, batch_size=32, is_composed=True, step_s=None
    ),
}


class Compose:
    """As torchvision's, which is not among the requirements."""

    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, example: Any) -> Any:
        for transform in self.transforms:
            example = transform(example)
        return example


class Transformed(Dataset[Any]):
    """`transform(read(index))`."""

    def __init__(self, indices: range, read_one: Callable[[int], Any], transform: Callable[[Any], Any]) -> None:
        self.indices = indices
        self.read_one = read_one
        self.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read_one(self.indices[index]))


def read(index: int, *, wait_s: float, shard: int | None, open_s: float) -> bytes:
    """Wait as for a store."""
    if shard is not None and index % shard == shard // 2:
        time.sleep(open_s)
    if wait_s:
        time.sleep(wait_s)
    return _PACKED[index % len(_PACKED)]


def decode(content: bytes, *, count: int) -> np.ndarray[Any, Any]:
    """Decompress `count` times: uint8 [3, 32, 32]."""
    for _ in range(count):
        pixels = zlib.decompress(content)
    return np.frombuffer(pixels, dtype=np.uint8).reshape(3, _SIDE, _SIDE)


def augment(pixels: np.ndarray[Any, Any], *, num_rolls: int) -> torch.Tensor:
    """Shift at random, `num_rolls` times: float32 [3, 32, 32]."""
    for _ in range(num_rolls):
        pixels = np.roll(pixels, int(torch.randint(0, _SIDE, ())), axis=2)
    return torch.from_numpy(pixels.astype(np.float32))


def normalise(image: torch.Tensor) -> torch.Tensor:
    """To about -1 .. 1."""
    return image.sub(20.0).div_(20.0)


class Trainer:
    """A tiny model on an emulated accelerator."""

    def __init__(self, step_s: float | None) -> None:
        self._step_s = step_s
        self._matrix = torch.rand(256, 256)
        self._model = torch.nn.Linear(3, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)

    def step(self, images: torch.Tensor) -> None:
        """One update on [B, 3, 32, 32]."""
        begin = time.perf_counter()
        loss = functional.mse_loss(self._model(images.mean(dim=(2, 3))), images.new_zeros(len(images), 1))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if self._step_s is None:
            for _ in range(_NUM_PRODUCTS):
                torch.mm(self._matrix, self._matrix)
        else:
            time.sleep(max(0.0, begin + self._step_s - time.perf_counter()))


def epochs(loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
    """Batches, epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=[*JOBS, *UNHURRIED])
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = (JOBS | UNHURRIED)[arguments.job]
    trainer = Trainer(job.step_s)
    for number, images in enumerate(epochs(job.loader()), 1):
        trainer.step(images)
        if number == FIRST_UPDATES:
            begin = time.perf_counter()
        if number == arguments.updates:
            break
    seconds = time.perf_counter() - begin
    arguments.out.write_text(str(seconds / (arguments.updates - FIRST_UPDATES)))


if __name__ == "__main__":
    main()
