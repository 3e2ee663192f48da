"""Pipelines with times of our choice."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.profile.model import Model
from stretto.profile.pipeline import Pipeline, Stage

NUM_BATCHES = 200


def constant(seconds: float, count: int = NUM_BATCHES) -> NDArray[np.float64]:
    return np.full(count, seconds)


def make_stage(
    name: str, *, cpu_s: float = 0.0, waiting_s: float = 0.0, item_bytes: float | None = 1000.0, **fields: Any
) -> Stage:
    return Stage(name=name, wall_s=cpu_s + waiting_s, cpu_s=cpu_s, item_bytes=item_bytes, **fields)


Times = float | NDArray[np.float64]
"""The same for all batches, or of each."""


def make_pipeline(service_s: Times = 0.064, step_s: Times = 0.010, **fields: Any) -> Pipeline:
    """Two workers that wait `service_s` for each batch of 16 examples, and a step that needs no core.

    The waits are those that follow, where they are not given.
    """
    num_workers = fields.get("num_workers", 2)
    service = service_s if isinstance(service_s, np.ndarray) else constant(service_s)
    steps = step_s if isinstance(step_s, np.ndarray) else constant(step_s)
    wait_s = 0.0
    if len(service) and len(steps):
        mean_s = float(service.mean())
        wait_s = max(0.0, mean_s / num_workers - float(steps.mean())) if num_workers else mean_s
    values: dict[str, Any] = {
        "name": "DataLoader",
        "dataset": "Photos",
        "is_map_style": True,
        "num_workers": num_workers,
        "prefetch_factor": 2 if num_workers else None,
        "pin_memory": False,
        "persistent_workers": False,
        "batch_size": 16.0,
        "batch_bytes": 16_000,
        "num_batches": 100,
        "num_examples": 1600,
        "num_epochs": 1,
        "can_be_echoed_by_example": True,
        "echo_factor": 1.0,
        "cores": 2.0,
        "device": "cpu",
        "stages": (),
        "service_s": service,
        "service_cpu_s": constant(0.0, len(service)),
        "core_wait_s": constant(0.0, len(service)),
        "wait_s": constant(wait_s, len(steps)),
        "step_s": steps,
        "step_cpu_s": 0.0,
        "first_wait_s": constant(0.05, 1),
        "transfer_s": 0.0,
        "batches_per_update": 1.0,
    }
    return Pipeline(**values | fields)


def simulated(pipeline: Pipeline) -> Pipeline:
    """With the mean wait that its bursts lead to."""
    model = Model(replace(pipeline, wait_s=np.zeros(0)))
    stall = model.predict(model.present).stall_share
    return replace(pipeline, wait_s=constant(pipeline.t_down_s * stall / (1 - stall)))
