"""What the model predicts where the answer is known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.profile.model import Model, Prediction, predict, present_settings
from stretto.profile.pipeline import Pipeline
from tests.profile.pipelines import constant, make_pipeline, make_stage

TIMES = st.floats(0.001, 0.2)
STAGES = (
    make_stage("read", waiting_s=0.003),
    make_stage("augment", waiting_s=0.001),
    make_stage("collate"),
)
"""Of 64 ms a batch 48 before `augment`, 16 in it."""


def ask(pipeline: Pipeline, **changes: Any) -> Prediction:
    return predict(pipeline, replace(present_settings(pipeline), **changes))


def seconds(pipeline: Pipeline, **changes: Any) -> float:
    """Of an update."""
    return 1 / ask(pipeline, **changes).updates_per_s


@given(TIMES, TIMES, st.floats(1.1, 16))
@settings(max_examples=30)
def test_an_overlapped_echo_takes_the_longer_of_t_up_and_e_t_down(
    t_up: float, t_down: float, factor: float
) -> None:
    pipeline = make_pipeline(t_up, t_down, num_workers=1)
    expected = max(t_up, factor * t_down) / factor
    assert seconds(pipeline, factor=factor) == pytest.approx(expected, rel=1e-3)


@given(TIMES, TIMES, st.floats(1.1, 16))
@settings(max_examples=30)
def test_an_echo_without_overlap_takes_t_up_and_e_t_down(t_up: float, t_down: float, factor: float) -> None:
    stages = (make_stage("read", waiting_s=t_up / 16), make_stage("collate"))
    pipeline = make_pipeline(t_up, t_down, num_workers=0, stages=stages)
    expected = (t_up + factor * t_down) / factor
    assert seconds(pipeline, factor=factor, echo_after="read") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_workers", "expected"), [(1, 0.064), (2, 0.032), (5, 0.0128), (7, 0.010), (16, 0.010)]
)
def test_workers_that_wait_are_not_bound_by_cores(num_workers: int, expected: float) -> None:
    assert seconds(make_pipeline(0.064, 0.010), num_workers=num_workers) == pytest.approx(expected)


@pytest.mark.parametrize(("num_workers", "expected"), [(1, 0.064), (2, 0.032), (4, 0.032), (8, 0.032)])
def test_workers_that_compute_are_bound_by_cores(num_workers: int, expected: float) -> None:
    pipeline = make_pipeline(0.064, 0.010, service_cpu_s=constant(0.064))
    assert seconds(pipeline, num_workers=num_workers) == pytest.approx(expected, rel=0.01)


@given(
    service=TIMES,
    cpu_share=st.floats(0, 1),
    step_s=TIMES,
    step_share=st.floats(0, 1),
    cores=st.integers(1, 4),
    more=st.integers(1, 12),
)
@settings(max_examples=50)
def test_no_prediction_computes_more_than_the_cores_can(
    service: float, cpu_share: float, step_s: float, step_share: float, cores: int, more: int
) -> None:
    cpu_s, step_cpu_s = service * cpu_share, step_s * step_share
    pipeline = make_pipeline(
        service, step_s, num_workers=1, cores=float(cores), service_cpu_s=constant(cpu_s), step_cpu_s=step_cpu_s
    )
    now = 1 / Model(pipeline).updates_per_s
    cores_seen = max(cores, (cpu_s + step_cpu_s) / now)  # one core cannot have done what was measured on it
    assert ask(pipeline, num_workers=more).updates_per_s * (cpu_s + step_cpu_s) <= cores_seen * 1.01


def test_the_wait_for_a_core_is_not_part_of_what_a_batch_costs() -> None:
    # 4 workers on 2 cores: 40 ms of computing take 80. With 2 workers nobody waits, and as much is made.
    pipeline = make_pipeline(
        0.080, 0.005, num_workers=4, service_cpu_s=constant(0.040), core_wait_s=constant(0.040)
    )
    assert seconds(pipeline) == pytest.approx(0.020)
    assert seconds(pipeline, num_workers=2) == pytest.approx(0.020, rel=0.02)
    assert seconds(pipeline, num_workers=1) == pytest.approx(0.040, rel=0.02)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0.032), (2.0, 0.020), (4.0, 0.014), (8.0, 0.011)])
def test_inside_the_workers_only_the_stages_after_the_echo_point_run_for_each_use(
    factor: float, expected: float
) -> None:
    pipeline = make_pipeline(0.064, 0.010, stages=STAGES, batch_size=1e6)  # (48 / e + 16) / 2 workers
    assert seconds(pipeline, factor=factor, echo_after="read") == pytest.approx(expected, rel=0.01)


def test_small_batches_read_now_more_and_now_less_which_costs_time() -> None:
    large, small = (make_pipeline(0.064, 0.010, stages=STAGES, batch_size=size) for size in (1e6, 2))
    assert seconds(small, factor=8.0, echo_after="read") > 1.05 * seconds(large, factor=8.0, echo_after="read")


def test_a_cache_leaves_the_stages_behind_it() -> None:
    prediction = ask(make_pipeline(0.064, 0.001, stages=STAGES), cached_after="read")
    assert prediction.updates_per_s == pytest.approx(1 / 0.008)
    assert prediction.fresh_per_s == pytest.approx(16 / 0.008)  # every example still differs


@pytest.mark.parametrize(("num_workers", "factor"), [(2, 3.2), (1, 6.4)])
def test_auto_never_waits_and_its_factor_is_r(num_workers: int, factor: float) -> None:
    prediction = ask(make_pipeline(0.064, 0.010), factor="auto", num_workers=num_workers)
    assert prediction.stall_share == 0
    assert prediction.updates_per_s == pytest.approx(100)
    assert prediction.factor == pytest.approx(factor, rel=0.01)


def test_auto_waits_for_a_fresh_batch_after_the_most_uses() -> None:
    prediction = ask(make_pipeline(0.64, 0.010), factor="auto", max_factor=8)
    assert prediction.updates_per_s == pytest.approx(8 / 0.32, rel=0.01)
    assert prediction.factor == pytest.approx(8, rel=0.02)


def test_a_longer_queue_fills_the_stalls_of_a_store_with_bursts() -> None:
    service = np.tile([*[0.001] * 9, 0.045], 40)  # 5.4 ms a batch on average, a step takes 10
    pipeline = make_pipeline(step_s=0.010, service_s=service, num_workers=1, wait_s=constant(0.0015))
    now, ahead = ask(pipeline), ask(pipeline, prefetch_factor=16)
    assert now.stall_share > 0.05
    assert ahead.stall_share == 0


def test_receiving_a_batch_takes_the_loop_time_that_no_worker_saves_but_the_thread_of_an_echo() -> None:
    pipeline = make_pipeline(0.064, 0.010, receive_s=0.002)
    assert seconds(pipeline) == pytest.approx(0.032)
    assert seconds(pipeline, num_workers=16) == pytest.approx(0.012)
    assert seconds(pipeline, factor=4.0) == pytest.approx(0.010)


def test_without_workers_to_measure_it_by_receiving_a_batch_is_taken_to_cost_a_millisecond() -> None:
    pipeline = make_pipeline(0.032, 0.010, num_workers=0)
    assert seconds(pipeline) == pytest.approx(0.042)
    assert seconds(pipeline, num_workers=16) == pytest.approx(0.011)


def test_random_times_cost_more_than_their_means() -> None:
    rng = np.random.default_rng(0)
    pipeline = make_pipeline(service_s=rng.exponential(0.010, 1000), step_s=rng.exponential(0.010, 1000))
    pipeline = replace(pipeline, num_workers=1, wait_s=constant(0.002))
    assert seconds(pipeline, num_workers=1) > 0.011


def test_time_lost_between_processes_is_the_workers_so_that_echo_gives_all_that_a_step_allows() -> None:
    pipeline = make_pipeline(0.064, 0.010, wait_s=constant(0.030))  # a batch in 40 ms, though workers make it in 32
    assert seconds(pipeline) == pytest.approx(0.040)
    assert seconds(pipeline, factor=2.0) == pytest.approx(0.020, rel=0.01)
    assert seconds(pipeline, factor=5.0) == pytest.approx(0.010, rel=0.01)


def test_a_pipeline_without_any_service_times_is_known_by_its_waits() -> None:
    pipeline = make_pipeline(service_s=np.zeros(0), step_s=constant(0.010), wait_s=constant(0.030))
    assert seconds(pipeline) == pytest.approx(0.040)
    assert seconds(pipeline, factor=4.0) == pytest.approx(0.010)


def test_fresh_examples_are_those_of_the_updates_over_the_factor() -> None:
    pipeline = make_pipeline(0.064, 0.010, batches_per_update=4.0)
    prediction = ask(pipeline, factor=2.0)
    assert prediction.updates_per_s == pytest.approx(1 / 0.016 / 4)
    assert prediction.fresh_per_s == pytest.approx(16 / 0.032)
    assert prediction.speedup == pytest.approx(2)


def test_an_echo_in_place_is_part_of_the_present() -> None:
    pipeline = make_pipeline(0.064, 0.010, echo_factor=2.0, wait_s=constant(0.006))
    assert ask(pipeline).updates_per_s == pytest.approx(1 / 0.016)
    assert ask(pipeline).fresh_per_s == pytest.approx(16 / 0.032)
    assert ask(pipeline, num_workers=4).updates_per_s == pytest.approx(100)


def test_the_same_measurements_give_the_same_prediction() -> None:
    rng = np.random.default_rng(1)
    pipeline = make_pipeline(service_s=rng.exponential(0.064, 300), step_s=rng.exponential(0.01, 200))
    assert ask(pipeline, factor=3.0) == ask(pipeline, factor=3.0)
