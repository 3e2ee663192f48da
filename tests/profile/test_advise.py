"""What is advised, in which order, and what the verdict says."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.profile.advise import advise, verdict
from stretto.profile.pipeline import Pipeline, Stage, fixed_stages
from stretto.profile.schema import AdviceRecord
from stretto.profile.worth import MEASURED, SOURCE, Where, worth
from tests.profile.pipelines import constant, make_pipeline, make_stage, simulated

RESULTS = Path(__file__).parents[2] / "benchmarks/results/fresh_examples.json"
TITLES: dict[Where, str] = {
    "before": "examples, before augmentation",
    "after": "examples, after augmentation",
    "batch": "batch echoing",
}

SLOW_FETCH = make_pipeline(0.064, 0.010, stages=(make_stage("read", waiting_s=0.004), make_stage("collate")))
SLOW_DECODE = make_pipeline(
    0.070,
    0.010,
    service_cpu_s=constant(0.070),
    stages=(
        make_stage("read", cpu_s=0.0001),
        make_stage("decode", cpu_s=0.004),
        make_stage("augment", cpu_s=0.0003),
        make_stage("collate", item_bytes=None),
    ),
)
NO_OVERLAP = make_pipeline(0.064, 0.010, num_workers=0)
BURSTS = simulated(make_pipeline(np.tile([*[0.001] * 9, 0.045], 40), 0.010, num_workers=1))
STALLS = simulated(make_pipeline(np.tile([*[0.002] * 25, 0.5], 20), 0.010, num_workers=1))
FINE = make_pipeline(0.015, 0.010, wait_s=constant(0.0003), first_wait_s=constant(0.001, 1))


def actions(pipeline: Pipeline) -> list[str]:
    return [record["action"] for record in advise(pipeline)]


def find(pipeline: Pipeline, action: str, where: str | None = None) -> AdviceRecord:
    (record,) = (r for r in advise(pipeline) if r["action"] == action and where in {None, r["where"]})
    return record


def judge(pipeline: Pipeline) -> tuple[str, list[str], str]:
    return verdict(pipeline, advise(pipeline))


@pytest.mark.parametrize("where", ["before", "after", "batch"])
def test_the_worth_of_a_use_is_what_was_measured(where: Where) -> None:
    results = {row["what"]: row["median"] for row in json.loads(RESULTS.read_text())["results"]}
    measured = {e: results[f"{TITLES[where]}, e = {e}, N(e) / N(1)"] for e in (2, 4, 8)}
    assert MEASURED[where] == {1: 1.0} | measured
    assert [worth(where, e) for e in (1, 2, 4, 8)] == [1.0, *(pytest.approx(value) for value in measured.values())]


@given(st.sampled_from(["before", "after", "batch"]), st.floats(1, 8), st.floats(1, 8))
def test_the_worth_falls_with_the_factor_and_is_never_better_than_ideal(where: Where, a: float, b: float) -> None:
    low, high = worth(where, min(a, b)), worth(where, max(a, b))
    assert low is not None
    assert high is not None
    assert low >= high >= 1 / max(a, b)


@pytest.mark.parametrize("factor", [0.5, 8.01, 16])
def test_the_worth_is_not_known_beyond_what_was_measured(factor: float) -> None:
    assert worth("before", factor) is None


def test_a_read_that_sleeps_is_a_wait_and_is_met_by_more_workers_than_cores() -> None:
    line, evidence, next_step = judge(SLOW_FETCH)
    assert line == (
        "Input-bound: the updates wait 69 % of the time, and workers spend 100 % of theirs waiting for reads "
        '(in "read").'
    )
    assert (
        "Each of 2 workers spends 64 ms on a batch: 0 % computing, 100 % waiting, 0 % ready but without a core."
        in (evidence)
    )
    first = advise(SLOW_FETCH)[0]
    assert first["change"] == {"num_workers": 7}
    assert first["command"] == "--workers 7"
    assert first["updates_per_s"] == pytest.approx(100)
    assert first["speedup"] == pytest.approx(3.2)
    assert next_step.endswith("times the updates a second.")


def test_a_decoder_that_computes_is_not_met_by_more_workers() -> None:
    line, _, next_step = judge(SLOW_DECODE)
    assert line.endswith('and workers spend 100 % of theirs computing, most of it in "decode".')
    assert "workers" not in actions(SLOW_DECODE)
    assert (
        '"decode" takes 91 % of a worker\'s time and 100 % of that is computing'
        in find(SLOW_DECODE, "stage")["why"]
    )
    assert next_step.startswith('Echo after "decode"')


def test_a_loop_without_workers_is_told_first_that_nothing_overlaps() -> None:
    line, _, next_step = judge(NO_OVERLAP)
    assert line.startswith("Not overlapped: with num_workers=0")
    first = advise(NO_OVERLAP)[0]
    assert (first["action"], first["change"], first["command"]) == ("overlap", {"num_workers": 6}, "--workers 6")
    assert first["speedup"] == pytest.approx(74 / 11)
    assert next_step.startswith("Make batches while updates run: num_workers=6")


def test_a_run_that_hardly_waits_is_told_that_it_is_fine() -> None:
    line, _, next_step = judge(FINE)
    assert line == "Not input-bound: the updates run 97 % of the time, which is fine."
    assert next_step == "Leave the input as it is."
    (record,) = advise(FINE)
    assert record["action"] == "none"
    assert record["title"] == "Echoing will not help: the updates wait 3 % of the time, and R is 0.75"


def test_bursts_are_met_by_a_longer_queue() -> None:
    record = find(BURSTS, "prefetch")
    assert record["change"] == {"prefetch_factor": 8}
    assert record["command"] == "--prefetch 8"
    assert record["speedup"] == pytest.approx(12.5 / 10)


def test_a_queue_is_not_made_longer_than_a_gibibyte() -> None:
    assert "prefetch" not in actions(replace(BURSTS, batch_bytes=1 << 29))


def test_a_store_that_stalls_for_longer_than_it_makes_is_echoed_by_auto() -> None:
    record = find(STALLS, "echo", "examples")
    assert record["change"] == {"unit": "example", "factor": "auto"}
    assert record["command"] == "--echo auto"
    # Of 26 batches 6 are queued during the stall, and then one is admitted with each update: 0.7 s.
    assert record["factor"] == pytest.approx(0.70 / 0.26, rel=0.01)
    assert record["updates_per_s"] == pytest.approx(100, rel=0.01)


def test_slow_starts_of_epochs_are_met_by_workers_that_stay() -> None:
    pipeline = make_pipeline(0.015, 0.010, num_epochs=20, num_batches=50, first_wait_s=constant(0.515, 20))
    record = find(pipeline, "persistent_workers")
    assert record["speedup"] == pytest.approx(1.015 / 0.515)
    assert record["updates_per_s"] == pytest.approx(50 / 0.515)
    line, _, _ = judge(replace(pipeline, first_wait_s=constant(0.515, 20)))
    assert line.startswith("Input-bound where epochs begin: the updates wait 84 % of the time")
    assert "persistent_workers" not in actions(replace(pipeline, persistent_workers=True))
    assert "persistent_workers" not in actions(replace(pipeline, num_epochs=1))


def test_an_epochs_first_batch_is_waited_for_once() -> None:
    pipeline = make_pipeline(
        0.064, 0.010, num_workers=1, num_epochs=5, num_batches=11, first_wait_s=constant(0.364)
    )
    epoch_s = 11 * 0.010 + 10 * 0.054 + 0.364
    assert find(pipeline, "persistent_workers")["speedup"] == pytest.approx(epoch_s / (epoch_s - 0.3))


def test_pinned_memory_is_for_an_accelerator_whose_copies_take_long() -> None:
    pipeline = make_pipeline(0.002, 0.010, device="cuda:0", transfer_s=0.004)
    assert find(pipeline, "pin_memory")["speedup"] == pytest.approx(10 / 8)
    assert actions(replace(pipeline, pin_memory=True)) == ["none"]
    assert actions(replace(pipeline, device="cpu")) == ["none"]


def test_a_data_set_that_fits_in_memory_can_be_kept_after_its_slow_stage() -> None:
    pipeline = replace(SLOW_DECODE, num_epochs=5)
    record = find(pipeline, "cache")
    assert record["where"] == "decode"
    assert record["buffer_bytes"] == 1000 * 1600 * 2  # in each of two workers
    assert "cache" not in actions(replace(pipeline, num_examples=10**12))
    assert "cache" not in actions(SLOW_DECODE)  # one epoch


@pytest.mark.parametrize(
    ("names", "num_fixed"),
    [
        (["read", "decode", "augment"], 2),
        (["read", "Resize", "ToTensor", "Normalize", "Normalize_2"], 5),
        (["read", "RandomResizedCrop", "Normalize"], 1),
        (["read", "LoadImaged", "Spacingd", "RandFlipd"], 3),
        (["mystery", "decode", "function"], 2),
        ([], 0),
    ],
)
def test_stages_behind_one_that_may_be_random_are_not_fixed(names: list[str], num_fixed: int) -> None:
    stages = [make_stage(name, cpu_s=0.001) for name in names]
    assert fixed_stages(stages) == stages[:num_fixed]


def test_nothing_random_is_kept_in_memory_and_a_use_behind_it_counts_as_after_augmentation() -> None:
    stages = tuple(
        replace(stage, name="RandomCrop" if stage.name == "decode" else stage.name) for stage in SLOW_DECODE.stages
    )
    pipeline = replace(SLOW_DECODE, num_epochs=5, stages=stages)
    assert all(record["where"] == "read" for record in advise(pipeline) if record["action"] == "cache")
    assert "a later stage is random" not in find(pipeline, "echo", "RandomCrop")["why"]
    assert "a later stage is random" in find(SLOW_DECODE, "echo", "decode")["why"]


def test_every_insertion_point_is_listed_with_r_falling_as_it_moves_up() -> None:
    records = [record for record in advise(SLOW_DECODE) if record["action"] == "echo"]
    ratios = {record["where"]: record["ratio"] for record in records}
    assert set(ratios) == {"read", "decode", "augment", "examples", "batch"}
    values = [ratios[where] for where in ("read", "decode", "augment", "examples", "batch")]
    assert values == sorted(values)
    assert ratios["batch"] == pytest.approx(3.5)
    useless = find(SLOW_DECODE, "echo", "read")
    assert (useless["factor"], useless["speedup"]) == (1.0, 1.0)
    assert advise(SLOW_DECODE)[-1] == useless
    assert useless["title"] == 'Do not echo after "read", in the workers: R is 0.023 there'


def test_an_echo_is_predicted_at_a_worth_of_one_and_at_the_measured_one() -> None:
    record = find(SLOW_FETCH, "echo", "batch")
    assert record["factor"] == 3  # with 3.5 uses updates would never wait, but more of them would be needed
    assert record["updates_per_s"] == pytest.approx(3 / 0.032)
    assert record["fresh_per_s"] == pytest.approx(16 / 0.032)
    assert record["speedup"] == pytest.approx(3)
    assert record["speedup_measured"] == pytest.approx(1 / (worth("batch", 3) or 0))
    assert SOURCE in record["why"]
    assert SOURCE.startswith("measured on Fashion-MNIST")


def test_an_iterable_data_set_is_echoed_after_the_loader_only() -> None:
    pipeline = replace(SLOW_FETCH, is_map_style=False, can_be_echoed_by_example=False, num_examples=None)
    (record,) = (record for record in advise(pipeline) if record["action"] == "echo")
    assert (record["where"], record["command"]) == ("batch", "--echo 3")
    assert "get_worker_info" in find(pipeline, "workers")["why"]


@pytest.mark.parametrize("name", ["DataLoader", "EchoDataLoader"])
def test_an_echo_in_place_is_not_advised_again(name: str) -> None:
    pipeline = replace(SLOW_DECODE, name=name, echo_factor=3.5, wait_s=constant(0.0), stages=())
    (record,) = advise(pipeline)
    assert record["action"] == "none"
    assert record["title"].startswith("Leave the echo as it is")
    assert "3.5 uses already" in record["why"]


def test_the_advised_changes_are_arguments_that_stretto_takes() -> None:
    staged = stretto.StagedDataset(range(64), read=float, decode=float, augment=float)
    for record in advise(SLOW_DECODE):
        if record["action"] == "echo" and "echo_after" in record["change"]:
            loader = stretto.EchoDataLoader(staged, batch_size=8, **record["change"])
            assert len(list(loader)) >= 8
        elif record["action"] == "echo":
            with stretto.echo(DataLoader(staged, batch_size=8), **record["change"]) as echoed:
                next(iter(echoed))


@pytest.mark.parametrize("row_floats", [10, 1 << 18])
def test_the_buffer_is_the_one_that_echo_makes(row_floats: int) -> None:
    rows = 16
    data = TensorDataset(torch.zeros(rows, 1).expand(rows, row_floats))
    with stretto.echo(DataLoader(data, batch_size=rows), 2.0) as echoed:
        next(iter(echoed))
        num_bytes = echoed.stats().buffer_bytes
    record = find(replace(SLOW_FETCH, batch_bytes=rows * row_floats * 4), "echo", "examples")
    assert record["buffer_bytes"] == num_bytes
    assert record["buffer_items"] == num_bytes // (row_floats * 4) - rows


def test_nothing_measured_is_said() -> None:
    pipeline = make_pipeline(np.zeros(0), np.zeros(0), first_wait_s=np.zeros(0))
    assert judge(pipeline) == ("Nothing was measured: no step and no wait.", [], "Run more updates.")
    assert actions(pipeline) == ["none"]


SECONDS = st.one_of(st.just(0.0), st.floats(1e-7, 10))
SERIES = st.lists(SECONDS, max_size=40).map(np.array)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    service = draw(SERIES)
    shares = draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))
    num_workers = draw(st.integers(0, 6))
    stages = [
        Stage(
            name=name,
            wall_s=wall_s,
            cpu_s=wall_s * draw(st.floats(0, 1)),
            item_bytes=draw(st.one_of(st.none(), st.floats(0, 1e12))),
        )
        for name in draw(st.sampled_from([(), ("read",), ("read", "decode", "augment", "collate")]))
        for wall_s in [draw(SECONDS)]
    ]
    values: dict[str, Any] = {
        "name": draw(st.sampled_from(["DataLoader", "EchoDataLoader"])),
        "is_map_style": draw(st.booleans()),
        "num_workers": num_workers,
        "prefetch_factor": draw(st.integers(1, 4)) if num_workers else None,
        "batch_size": draw(st.sampled_from([1.0, 7.5, 64.0, 8192.0])),
        "batch_bytes": draw(st.one_of(st.none(), st.integers(0, 1 << 40))),
        "num_batches": draw(st.one_of(st.none(), st.integers(0, 1000))),
        "num_examples": draw(st.one_of(st.none(), st.integers(0, 10**9))),
        "num_epochs": draw(st.integers(0, 5)),
        "can_be_echoed_by_example": draw(st.booleans()),
        "echo_factor": draw(st.sampled_from([1.0, 1.0, 2.5])),
        "cores": draw(st.sampled_from([0.5, 1.0, 2.0, 64.0])),
        "device": draw(st.sampled_from(["cpu", "cuda:0"])),
        "stages": tuple(stages),
        "service_cpu_s": service * shares[0],
        "core_wait_s": service * (1 - shares[0]) * shares[1],
        "wait_s": draw(SERIES),
        "step_cpu_s": draw(SECONDS),
        "first_wait_s": draw(SERIES),
        "transfer_s": draw(SECONDS),
        "batches_per_update": draw(st.sampled_from([1.0, 2.5])),
    }
    return make_pipeline(service, draw(SERIES), **values)


@given(pipelines())
@settings(max_examples=40)
def test_any_measurement_gives_advice_that_is_finite_ranked_and_can_be_tried(pipeline: Pipeline) -> None:
    records = advise(pipeline)
    line, evidence, next_step = verdict(pipeline, records)
    assert records
    json.dumps(records, allow_nan=False)
    assert line
    assert next_step
    assert not any(re.search(r"\b(nan|inf)\b", text) for text in [line, next_step, *evidence])
    if any(record["action"] == "none" for record in records):
        assert len(records) == 1
    for record in records:
        assert not re.search(r"\b(nan|inf)\b", record["title"] + record["why"])
        assert record["factor"] is None or record["factor"] >= 1
        if record["command"] is not None:
            assert re.fullmatch(r"--(echo (auto|[\d.]+)|workers \d+|prefetch \d+)", record["command"])
        if record["action"] == "echo":
            assert pipeline.echo_factor == 1
            assert pipeline.ratio >= 1.1
    overlaps = [record["action"] for record in records if record["action"] == "overlap"]
    assert not overlaps or records[0]["action"] == "overlap"
