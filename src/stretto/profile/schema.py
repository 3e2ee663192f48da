"""The record of a run, as `--json` writes it and `stretto compare`, the report, the page and the trace read it.

Times are in seconds from the start of the command, durations in seconds, unless the name says otherwise.
"""

from typing import Any, TypedDict

VERSION = 1


class Percentiles(TypedDict):
    """Of durations, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class StageRecord(TypedDict):
    """A part of making a batch, means per example ("collate": per batch)."""

    name: str
    wall_ms: float
    cpu_ms: float
    item_bytes: float | None


class EchoRecord(TypedDict):
    """What `--echo` did to a loader, or an EchoDataLoader's own statistics."""

    unit: str
    """"example", "batch" or "workers" (an EchoDataLoader of the script's)."""
    factor: float | str
    """As asked for."""
    realised: float
    uses: int
    fresh_items: int
    fresh_batches: int
    dropped_uses: int
    buffer_bytes: int
    began_at_update: int


class LoaderRecord(TypedDict):
    """One loader of the script."""

    name: str
    """The class."""
    dataset: str
    is_training: bool
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    batch_size: float | None
    """Mean examples in a batch."""
    batch_bytes: int | None
    length: int | None
    """len(loader)."""
    iterations: int
    batches: int
    """That the script fetched."""
    overlaps: bool
    t_up_s: float | None
    t_down_s: float | None
    ratio: float | None
    """R = t_up / t_down at the loader's end; None where it was not measured (no training loader)."""
    ratio_first: float | None
    ratio_last: float | None
    """R over the first and the last quarter of its batches: its drift."""
    service_ms: Percentiles | None
    """Of a batch in a worker."""
    cpu_share: float | None
    """Of that time, the share in which the worker computed."""
    core_wait_share: float | None
    """Of that time, the share in which it could have run but no core was free."""
    queue_mean: float | None
    """Batches that were ready when the loop asked for one."""
    queue_empty_share: float | None
    """How often none was."""
    stages: list[StageRecord]
    echo: EchoRecord | None
    why_not_echoed: str | None
    """With --echo: the reason why this training loader was not."""


class TimeRecord(TypedDict):
    """Where a rank's time went, in seconds; the parts add up to `total_s`."""

    total_s: float
    """From the first training batch asked for to the end of the last update."""
    update_s: float
    """In update steps."""
    wait_s: float
    """Waiting for a batch, without each epoch's first one. On a GPU the time it really stood still."""
    first_wait_s: float
    """Waiting for each epoch's first batch."""
    transfer_s: float
    """Copying batches to the accelerator."""
    other_s: float
    """Between epochs: validation, checkpoints."""


class Window(TypedDict):
    """A part of the timeline."""

    t: float
    """Where it begins."""
    seconds: float
    updates: int
    update_s: float
    wait_s: float
    """With the first batches of epochs."""
    other_s: float
    ratio: float | None
    factor: float
    """The realised echoing factor up to its end, 1 without."""


class RankRecord(TypedDict):
    """One process that trained."""

    rank: int
    world_size: int
    pid: int
    host: str
    device: str
    updates: int
    """Spans between two fetched batches in which an optimizer stepped."""
    optimizer_steps: int
    optimizers: list[str]
    batches: int
    """Of the training loaders."""
    time: TimeRecord
    au_percent: float
    """Accelerator utilisation: update_s / total_s, in percent."""
    stall_percent: float
    """(wait_s + first_wait_s) / total_s, in percent."""
    updates_per_s: float
    """updates / total_s."""
    s_per_update: float
    """(total_s - other_s) / updates: mean seconds from one update to the next, without what lies between epochs."""
    wait_ms: Percentiles
    step_ms: Percentiles
    burst_share: float
    """The share of the stall that lies in the worst 1 % of batches."""
    loaders: list[LoaderRecord]
    timeline: list[Window]
    ended: str
    """How: "finished", "raised <class>: <message>", "stopped after N updates" or "ended without notice"."""


class AdviceRecord(TypedDict):
    """A thing to do, with what it is predicted to give."""

    action: str
    """"overlap", "workers", "prefetch", "persistent_workers", "pin_memory", "stage", "cache", "echo", "none"."""
    title: str
    """What to do, in a line."""
    why: str
    change: dict[str, Any]
    """The arguments to set, such as {"num_workers": 4} or {"factor": 3.0, "echo_after": "decode"}."""
    where: str | None
    """For echo the insertion point: a stage's name, "batch" or "examples"."""
    ratio: float | None
    """R at that point."""
    factor: float | None
    buffer_items: int | None
    buffer_bytes: int | None
    updates_per_s: float | None
    fresh_per_s: float | None
    """Fresh examples a second."""
    speedup: float | None
    """Updates a second over the present; the speed-up to a target if each use were worth a fresh one."""
    speedup_measured: float | None
    """To a target, at the worth of a repeated use measured in benchmarks/results/fresh_examples.json."""
    command: str | None
    """The options of `stretto run` that try it on the unchanged script, such as "--workers 6"; None if none do."""


class RunRecord(TypedDict):
    """All of it."""

    version: int
    stretto: str
    torch: str
    python: str
    host: str
    cores: float
    command: list[str]
    options: dict[str, Any]
    """Those of `stretto run`: echo, steps, workers, prefetch."""
    started: str
    """UTC, ISO 8601."""
    seconds: float
    """Of the whole command."""
    exit_code: int | None
    """None where a signal ended it."""
    exit_signal: str | None
    ranks: list[RankRecord]
    """By rank; empty where no training was recognised."""
    straggler: str | None
    """A sentence that names the rank which the others wait for."""
    verdict: str
    evidence: list[str]
    next_step: str
    advice: list[AdviceRecord]
    """Ranked; of the rank that waits the most."""
    findings: list[str]
    """Repeated batches, identical augmentation, things seen that stop `stretto run` from working."""
