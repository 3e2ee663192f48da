"""Records of runs as `stretto run` writes them."""

from typing import Any

from stretto.profile.schema import (
    AdviceRecord,
    LoaderRecord,
    Percentiles,
    RankRecord,
    RunRecord,
    StageRecord,
    TimeRecord,
    Window,
)


def percentiles(mean: float) -> Percentiles:
    return Percentiles(mean=mean, p50=0.9 * mean, p90=1.5 * mean, p99=3 * mean, max=8 * mean)


def time_record(
    update: float, wait: float, first: float = 2.0, transfer: float = 0.5, other: float = 3.0
) -> TimeRecord:
    return TimeRecord(
        total_s=update + wait + first + transfer + other,
        update_s=update,
        wait_s=wait,
        first_wait_s=first,
        transfer_s=transfer,
        other_s=other,
    )


def loader(**changes: Any) -> LoaderRecord:
    found = LoaderRecord(
        name="DataLoader",
        dataset="Photos",
        is_training=True,
        num_workers=2,
        prefetch_factor=2,
        pin_memory=False,
        persistent_workers=False,
        batch_size=64.0,
        batch_bytes=64 * 3 * 224 * 224 * 4,
        length=500,
        iterations=2,
        batches=1000,
        overlaps=True,
        t_up_s=0.066,
        t_down_s=0.018,
        ratio=3.67,
        ratio_first=3.4,
        ratio_last=3.9,
        service_ms=percentiles(132.0),
        cpu_share=0.18,
        core_wait_share=0.01,
        queue_mean=0.2,
        queue_empty_share=0.91,
        stages=[
            StageRecord(name="read", wall_ms=1.62, cpu_ms=0.05, item_bytes=110_592.0),
            StageRecord(name="decode", wall_ms=0.31, cpu_ms=0.30, item_bytes=602_112.0),
            StageRecord(name="RandomResizedCrop", wall_ms=0.087, cpu_ms=0.09, item_bytes=150_528.0),
            StageRecord(name="collate", wall_ms=1.9, cpu_ms=1.8, item_bytes=None),
        ],
        echo=None,
        why_not_echoed=None,
    )
    return LoaderRecord(**{**found, **changes})  # type: ignore[typeddict-item]


def validation_loader() -> LoaderRecord:
    unmeasured = dict.fromkeys(("t_up_s", "t_down_s", "ratio", "ratio_first", "ratio_last", "service_ms"))
    return loader(is_training=False, length=20, iterations=2, batches=40, stages=[], cpu_share=None, **unmeasured)


def timeline(total_s: float, update_share: float, num_windows: int = 24) -> list[Window]:
    seconds = total_s / num_windows
    windows = []
    for k in range(num_windows):
        other = seconds * 0.2 if k == num_windows // 2 else 0.0
        update = min(seconds - other, seconds * update_share * (1 + 0.1 * ((k * 7) % 5 - 2)))
        windows.append(
            Window(
                t=1.5 + k * seconds,
                seconds=seconds,
                updates=40,
                update_s=update,
                wait_s=seconds - update - other,
                other_s=other,
                ratio=None if k == 0 else 3.67 + 0.1 * ((k * 7) % 5 - 2),
                factor=min(3.0, 1 + k / 4),
            )
        )
    return windows


def rank_record(rank: int = 0, world_size: int = 1, **changes: Any) -> RankRecord:
    time = changes.pop("time", time_record(update=18.0, wait=48.0))
    found = RankRecord(
        rank=rank,
        world_size=world_size,
        pid=4100 + rank,
        host="trainer-1",
        device="cpu",
        updates=1000,
        optimizer_steps=1000,
        optimizers=["AdamW"],
        batches=1000,
        time=time,
        au_percent=100 * time["update_s"] / time["total_s"],
        stall_percent=100 * (time["wait_s"] + time["first_wait_s"]) / time["total_s"],
        updates_per_s=1000 / time["total_s"],
        s_per_update=0.066,
        wait_ms=percentiles(48.0),
        step_ms=percentiles(18.0),
        burst_share=0.08,
        loaders=[loader(), validation_loader()],
        timeline=timeline(time["total_s"], time["update_s"] / time["total_s"]),
        ended="finished",
    )
    return RankRecord(**{**found, **changes})  # type: ignore[typeddict-item]


def advice(action: str, title: str, **changes: Any) -> AdviceRecord:
    found = AdviceRecord(
        action=action,
        title=title,
        why="The loop waits 69.9 % of the time, and a worker computes in 18.0 % of its own.",
        change={},
        where=None,
        ratio=None,
        factor=None,
        buffer_items=None,
        buffer_bytes=None,
        updates_per_s=None,
        fresh_per_s=None,
        speedup=None,
        speedup_measured=None,
        command=None,
    )
    return AdviceRecord(**{**found, **changes})  # type: ignore[typeddict-item]


def echo_advice(
    where: str, title: str, ratio: float, factor: float, num_bytes: int, measured: float
) -> AdviceRecord:
    return advice(
        "echo",
        title,
        change={"factor": factor},
        where=where,
        ratio=ratio,
        factor=factor,
        buffer_items=4096,
        buffer_bytes=num_bytes,
        updates_per_s=13.986 * factor,
        fresh_per_s=895.0,
        speedup=factor,
        speedup_measured=measured,
        command=f"--echo {factor:g}",
    )


def starved() -> RunRecord:
    """One rank that waits for its loader."""
    return RunRecord(
        version=1,
        stretto="0.1.0",
        torch="2.13.0",
        python="3.12.3",
        host="trainer-1",
        cores=8.0,
        command=["python", "train.py", "--data", "photos"],
        options={"echo": None, "steps": None, "workers": None, "prefetch": None},
        started="2025-03-04T05:06:07Z",
        seconds=75.25,
        exit_code=0,
        exit_signal=None,
        ranks=[rank_record()],
        straggler=None,
        verdict="The run waits for its input 69.9 % of the time: R = 3.67.",
        evidence=[
            "An update takes 18.0 ms, a fresh batch 66.0 ms from 2 workers.",
            "The workers computed in 18.0 % of their time; the rest they waited, most of it in read.",
        ],
        next_step="Start 8 workers, then measure again.",
        advice=[
            advice(
                "workers",
                "Start 8 workers instead of 2",
                change={"num_workers": 8},
                updates_per_s=50.3,
                fresh_per_s=3219.0,
                speedup=3.6,
                speedup_measured=3.6,
                command="--workers 8",
            ),
            echo_advice("decode", "Echo after decode, 3 uses each", 3.21, 3.0, 4096 * 602_112, 2.61),
            echo_advice("examples", "Echo examples after the loader", 3.67, 3.0, 4096 * 602_112, 2.22),
            echo_advice("batch", "Echo whole batches", 3.67, 2.0, 64 * 64 * 602_112, 1.31),
        ],
        findings=["Batch 7 was served again as batch 507: the loader shuffles with one seed in each epoch."],
    )


def straggling() -> RunRecord:
    """Two ranks, of which the second waits and the first waits for it."""
    quick = rank_record(0, 2, time=time_record(update=60.0, wait=6.0))
    slow = rank_record(1, 2, time=time_record(update=20.0, wait=46.0), host="trainer-2")
    return RunRecord(
        **{
            **starved(),
            "command": ["torchrun", "--nproc-per-node", "2", "train.py"],
            "ranks": [quick, slow],
            "straggler": "Rank 1 (trainer-2) is the one that the others wait for: its loader is 3.67 times slower.",
        }
    )


def unrecognised() -> RunRecord:
    """A script in which nothing trained."""
    return RunRecord(
        **{
            **starved(),
            "command": ["python", "-m", "evaluate"],
            "ranks": [],
            "verdict": "No training was recognised.",
            "evidence": ["2 loaders were iterated, and no optimizer of torch.optim stepped.", "Seen: flax.Adam."],
            "next_step": "Run a script that steps an optimizer of torch.optim.",
            "advice": [],
            "findings": [],
        }
    )


def killed() -> RunRecord:
    """A run that a signal ended before its first update was complete."""
    nothing = TimeRecord(total_s=0.0, update_s=0.0, wait_s=0.0, first_wait_s=0.0, transfer_s=0.0, other_s=0.0)
    rank = rank_record(
        time={**nothing, "total_s": 1.0},
        updates=0,
        au_percent=0.0,
        stall_percent=0.0,
        updates_per_s=0.0,
        timeline=[],
        loaders=[validation_loader()],
        ended="killed by SIGKILL",
    )
    rank["time"] = nothing
    return RunRecord(
        **{
            **starved(),
            "seconds": 0.8125,
            "exit_code": None,
            "exit_signal": "SIGKILL",
            "ranks": [rank],
            "verdict": "The run ended before it was measured.",
            "evidence": [],
            "next_step": "Find out what killed it; the kernel does when memory runs out.",
            "advice": [],
            "findings": [],
        }
    )


def with_names(name: str) -> RunRecord:
    """A record in which everything that the script can name is called `name`."""
    record = straggling()
    for rank in record["ranks"]:
        rank.update({"host": name, "device": name, "optimizers": [name], "ended": name})
        for each in rank["loaders"]:
            each.update({"name": name, "dataset": name, "why_not_echoed": name})
            for stage in each["stages"]:
                stage["name"] = name
    for item in record["advice"]:
        item.update({"title": name, "why": name, "command": name})
        if item["where"] is not None:
            item["where"] = name
    record.update({"command": ["python", name], "host": name, "straggler": name, "verdict": name})
    record.update({"evidence": [name], "next_step": name, "findings": [name]})
    return record
