"""The demonstration from the store to the record of its runs; see the package for the picture."""

import contextlib
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from stretto.demo.calibrate import DELAY_S, Speeds, measure_t_down, measure_t_up, set_ratio
from stretto.demo.conditions import BATCH_SIZE, NUM_WORKERS, Condition, conditions
from stretto.demo.fashion import load_fashion_mnist
from stretto.demo.link import Link
from stretto.demo.race import Goal, Outcome, race
from stretto.demo.reader import ShardDataset, open_store
from stretto.demo.server import ObjectStore
from stretto.demo.shards import upload
from stretto.profile.pipeline import HELPS_FROM_R

_SHARD = BATCH_SIZE  # one request a batch


@dataclass(kw_only=True, slots=True)
class Plan:
    """What to run.

    Raises ValueError for numbers that cannot work.
    """

    ratio: float = 6.0
    target: float = 83.0
    seeds: int = 1
    store: str | None = None
    upload: bool = False
    """Write the shards to `store` first."""
    names: list[str] | None = None
    """Conditions to run; None for all."""
    max_updates: int = 4000
    max_seconds: float = 300.0
    evaluate_every: int = 20

    def __post_init__(self) -> None:
        for name, at_least in (("ratio", 0.1), ("target", 0), ("seeds", 1), ("max_updates", 1)):
            if not getattr(self, name) >= at_least:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least {at_least}")
        if self.upload and self.store is None:
            raise ValueError("upload without a store: say where to with --store s3://BUCKET/PREFIX")
        known = [condition.name for condition in conditions(self.ratio)]
        if unknown := set(self.names or []) - set(known):
            raise ValueError(f"unknown conditions {sorted(unknown)}: expected some of {known}")

    def conditions(self, ratio: float) -> list[Condition]:
        """The chosen conditions for a measured R."""
        return [c for c in conditions(ratio) if self.names is None or c.name in self.names]


class Display:
    """What the demonstration says while it runs; the command line overrides it."""

    def say(self, message: str) -> None:
        """One line about what is going on."""

    def begin(self, condition: Condition, seed: int, target: float) -> None:
        """A run starts."""

    def update(self, outcome: Outcome) -> None:
        """An update has been made."""


def run(plan: Plan, display: Display) -> dict[str, Any]:
    """Run the demonstration. Returns a record of plain containers, ready for JSON.

    Raises what reading from the store raises, and RuntimeError if R cannot be set.
    """
    if os.name == "nt" and plan.store is None:
        raise RuntimeError("the demo's own server and link need Linux or macOS; name your own store with --store")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # One core is left to the servers and the workers, so that t_down does not depend on what they do.
    threads_before = torch.get_num_threads()
    torch.set_num_threads(max(1, cores - 1))
    try:
        with contextlib.ExitStack() as stack:
            fashion = load_fashion_mnist()
            test_images = torch.from_numpy(fashion.test_images.copy()).unsqueeze(1)
            test_labels = torch.from_numpy(fashion.test_labels.astype(np.int64))
            link: Link | None = None
            if plan.store is None:
                display.say("starting SeaweedFS and uploading Fashion-MNIST")
                server = stack.enter_context(ObjectStore())
                options: dict[str, Any] = {"access_key": server.access_key, "secret_key": server.secret_key}
                url = "s3://fashion/train"
                store = open_store(url, endpoint=server.endpoint, **options)
                upload(store, fashion.train_images, fashion.train_labels, examples_per_shard=_SHARD)
                link = stack.enter_context(Link(server.endpoint, delay_s=DELAY_S))
                options["endpoint"] = link.endpoint
            else:
                url, options = plan.store, {}
                if plan.upload:
                    display.say(f"uploading Fashion-MNIST to {url}")
                    upload(open_store(url), fashion.train_images, fashion.train_labels, examples_per_shard=_SHARD)
            dataset = ShardDataset(url, batch_size=BATCH_SIZE, **options)
            index = dataset.index()
            display.say(f"{index.num_examples:,} examples in {len(index.shards)} objects at {url}")
            t_down_s = measure_t_down(test_images, test_labels)
            display.say(f"t_down = {1000 * t_down_s:.1f} ms an update of {BATCH_SIZE}, with all servers running")
            if link is None:
                speeds = Speeds(t_down_s, measure_t_up(dataset), None)
                display.say(f"t_up = {1000 * speeds.t_up_s:.0f} ms, R = {speeds.ratio:.2f}, as your store gives it")
            else:
                batch_bytes = index.num_bytes / index.num_examples * BATCH_SIZE
                speeds = set_ratio(link, dataset, t_down_s, plan.ratio, batch_bytes, display.say)

            @contextlib.contextmanager
            def link_paused() -> Iterator[None]:
                if link is not None:
                    link.pause()
                try:
                    yield
                finally:
                    if link is not None:
                        link.resume()

            goal = Goal(
                test_images, test_labels, plan.target, plan.evaluate_every, plan.max_updates, plan.max_seconds
            )
            ratio = plan.ratio if link is not None else speeds.ratio
            chosen = plan.conditions(ratio)
            outcomes = []
            for seed in range(plan.seeds):
                for condition in chosen:
                    display.begin(condition, seed, plan.target)
                    outcomes.append(race(condition, dataset, goal, seed, link_paused, display.update))
    finally:
        torch.set_num_threads(threads_before)
    return _record(plan, speeds, chosen, outcomes, cores, url)


def _record(
    plan: Plan, speeds: Speeds, chosen: list[Condition], outcomes: list[Outcome], cores: int, url: str
) -> dict[str, Any]:
    runs = [
        {
            **asdict(outcome),
            "seconds": outcome.seconds,
            "au_percent": outcome.au_percent,
            "stall_percent": outcome.stall_percent,
            "factor": outcome.factor,
        }
        for outcome in outcomes
    ]
    rows = [_row(condition, runs) for condition in chosen]
    return {
        "version": 1,
        "machine": {
            "cores": cores,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "job": {
            "data": "Fashion-MNIST",
            "store": url if plan.store else "SeaweedFS on loopback behind a slow link",
            "target_percent": plan.target,
            "batch_size": BATCH_SIZE,
            "num_workers": NUM_WORKERS,
            "seeds": plan.seeds,
            "evaluate_every": plan.evaluate_every,
        },
        "speeds": {
            **asdict(speeds),
            "ratio": speeds.ratio,
            "delay_s": DELAY_S if plan.store is None else None,
        },
        "conditions": [asdict(condition) for condition in chosen],
        "rows": rows,
        "summary": summarise(speeds.ratio, plan.target, rows),
        "runs": runs,
    }


def _row(condition: Condition, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table: medians over the seeds, and the speed-up seed by seed."""
    mine = [r for r in runs if r["condition"] == condition.name]
    base = {r["seed"]: r["seconds"] for r in runs if r["condition"] == "none" and r["reached"]}
    speedups = [base[r["seed"]] / r["seconds"] for r in mine if r["reached"] and r["seed"] in base]
    medians = {
        name: statistics.median(r[name] for r in mine)
        for name in ("fresh_examples", "updates", "seconds", "au_percent", "stall_percent", "factor")
    }
    return {
        "condition": condition.name,
        "title": condition.title,
        "settings": condition.describe(),
        "reached": all(r["reached"] for r in mine),
        "accuracy": statistics.median(r["curve"][-1]["accuracy"] if r["curve"] else 0.0 for r in mine),
        **medians,
        "speedup": statistics.median(speedups) if speedups else None,
        "speedups": speedups,
    }


def summarise(ratio: float, target: float, rows: list[dict[str, Any]]) -> str:
    """The verdict in a sentence or two."""
    echoed = [row for row in rows if row["condition"] != "none" and row["speedup"] is not None]
    best = max(echoed, key=lambda row: row["speedup"], default=None)
    if ratio < HELPS_FROM_R:
        used = ", ".join(f"{row['title']}: AU {row['au_percent']:.0f} %" for row in rows)
        return (
            f"R = {ratio:.2f}: the input pipeline keeps up with the training step, so there is no idle time to "
            f"fill and no gain to be had. Use no echo. ({used}; what else differs is chance.)"
        )
    if best is None:
        return (
            f"R = {ratio:.2f}. No speed-up can be stated: that takes a run without echo and one with "
            f"echo which both reach {target:g} %."
        )
    return (
        f"R = {ratio:.2f}: the accelerator waits for {100 * (1 - 1 / ratio):.0f} % of the time without echoing. "
        f"{best['title']} reached {target:g} % {best['speedup']:.1f} times sooner than no echo "
        f"(at equal updates R is the limit)."
    )
