"""What was measured of a training loader and the updates that it feeds: the input of the model and the advice."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
HELPS_FROM_R = 1.1
"""The ratio t_up / t_down from which on echoing can help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of making a batch, in the order they run: read, the transform's members, collate last."""

    name: str
    wall_s: float
    """Mean seconds for one example ("collate": one batch)."""
    cpu_s: float
    """The part of `wall_s` in which the process computed; the rest it waited, for a disk, a network or a core."""
    item_bytes: float | None = None
    """Mean bytes of what it returns for one example, where they could be counted."""

    @property
    def cpu_share(self) -> float:
        """cpu_s / wall_s, at most 1."""
        return min(1.0, self.cpu_s / self.wall_s) if self.wall_s else 0.0


_FIXED = {
    *("read", "decode", "load", "parse", "open", "fetch", "tokenize", "tokenise", "collate"),
    *("totensor", "piltotensor", "toimage", "topilimage", "todtype", "totensorv2", "convertimagedtype", "tofloat"),
    *("resize", "centercrop", "longestmaxsize", "smallestmaxsize", "pad", "padifneeded", "grayscale"),
    *("normalize", "normalise", "scaleintensity", "scaleintensityrange"),
    *("loadimage", "ensurechannelfirst", "ensuretype", "orientation", "spacing"),
}
"""Names, without underscores, of stages that return the same each time; MONAI's for dictionaries end in "d"."""


def fixed_stages(stages: Sequence[Stage]) -> list[Stage]:
    """The first stages that return the same each time, as far as names tell; the very first one always counts.

    Any other name may be that of a random stage, and what follows a random stage is random too.
    """
    names = [re.sub(r"_\d+$", "", stage.name).lower().replace("_", "") for stage in stages]
    random_ones = [at for at, name in enumerate(names) if at and not {name, name.removesuffix("d")} & _FIXED]
    return list(stages[: min(random_ones, default=None)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A training loader and its updates, on one rank."""

    name: str
    """The loader's class."""
    dataset: str
    """The data set's class."""
    is_map_style: bool
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    batch_size: float
    """Mean examples in a batch; 1 where they cannot be counted."""
    batch_bytes: int | None
    """Bytes of all tensors and arrays of a batch."""
    num_batches: int | None
    """len(loader)."""
    num_examples: int | None
    """len(dataset)."""
    num_epochs: int
    """Iterations begun so far."""
    can_be_echoed_by_example: bool
    """Whether its batches can be taken apart (`stretto.echo(unit="example")`)."""
    echo_factor: float
    """The realised factor of an echo that is already in place, 1 without."""
    cores: float
    """Cores that this rank may really use."""
    device: str
    """"cpu", or the accelerator that the updates run on."""

    stages: tuple[Stage, ...]
    """Empty where the inside of the data set could not be seen."""
    service_s: FloatArray
    """Wall seconds that a worker (with `num_workers=0` the main process) spent on each batch, in order."""
    service_cpu_s: FloatArray
    """CPU seconds of the same."""
    core_wait_s: FloatArray
    """Seconds of the same in which it was ready to run but had no core."""
    wait_s: FloatArray
    """Seconds that the training loop waited for each batch, without each epoch's first one."""
    step_s: FloatArray
    """Seconds between getting each batch and asking for the next one, without validation and the like."""
    step_cpu_s: float
    """Mean CPU seconds of this process in one such step."""
    first_wait_s: FloatArray
    """Seconds that each epoch's first batch was waited for: the start of workers, and the first fetch."""
    receive_s: float = 0.0
    """Mean CPU seconds of this process in getting a batch from workers: what it takes though the batch is ready."""
    transfer_s: float
    """Mean seconds that moving one batch to the accelerator takes, 0 without one."""
    batches_per_update: float
    """1, or more where gradients are accumulated."""

    @property
    def overlaps(self) -> bool:
        """Whether batches are made while updates run."""
        return self.num_workers > 0

    @property
    def t_down_s(self) -> float:
        """Mean seconds of a downstream step: what is done with one batch."""
        return float(self.step_s.mean()) if len(self.step_s) else 0.0

    @property
    def t_up_s(self) -> float:
        """Mean seconds of an upstream step: one fresh batch, from all workers together.

        A batch costs a worker its service time, and W workers make W at once. Where the loop waits throughout, a
        batch arrives in the time of a wait and a step, which then counts also what is lost between processes.
        """
        service = float(self.service_s.mean()) / max(1, self.num_workers) if len(self.service_s) else 0.0
        if not len(self.wait_s):
            return service
        wait = float(self.wait_s.mean())
        if not self.overlaps and (self.echo_factor == 1 or self.name == "EchoDataLoader"):
            return wait  # an echo around the loader iterates it in a thread
        cycle = wait + self.t_down_s
        is_starved = wait > 0.05 * cycle
        fresh_cycle = cycle * self.echo_factor
        return max(service, fresh_cycle) if is_starved else min(service or cycle, cycle * self.echo_factor)

    @property
    def ratio(self) -> float:
        """R = t_up / t_down at the loader's end (arXiv 1907.05550, section 2)."""
        return self.t_up_s / self.t_down_s if self.t_down_s else float("inf")
