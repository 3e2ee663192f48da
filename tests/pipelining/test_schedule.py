"""Over processes every bit is that of the simulator, whatever the settings and the speeds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.pipelining import Repairs, Staleness
from tests.pipelining.processes import Pool
from tests.pipelining.training import (
    Run,
    adamw,
    convolutions,
    falling,
    images,
    joined,
    nadam,
    part,
    plain,
    rows,
    sgd,
    simulated,
)


def check(pool: Pool, run: Run, num_blocks: int) -> None:
    joined(pool.run(part, num_blocks, run)).check_is(simulated(run, num_blocks))


RUNS = {
    "m = K-1-k": Run(options={"seed": 4}),
    "longer queues": Run(options={"p": 1}),
    "far longer queues": Run(options={"p": (2, 2, 0, 0), "m": (9, 7, 0, 0)}),
    "backpropagation": Run(options={"m": (0, 0, 0, 0)}),
    "stashed": Run(options={"backward_params": "stashed"}),
    "stashed, longer queues, AdamW": Run(optimizer=adamw, options={"p": 1, "backward_params": "stashed"}),
    "AdamW, accumulate, clip": Run(optimizer=adamw, options={"p": 1, "accumulate": 3, "clip": 0.5}),
    "NAdam, predicted": Run(optimizer=nadam, options={"repairs": Repairs(predict=True)}),
    "SGD, predicted, stashed": Run(
        options={"p": 1, "repairs": Repairs(predict=True), "backward_params": "stashed"}
    ),
    "discount, warm-up, scheduler": Run(
        scheduler=falling,
        epochs=[rows(5), rows(4)],
        options={"p": 1, "repairs": Repairs(discount=0.5, discount_updates=6, warmup=4)},
    ),
    "autocast": Run(options={"autocast": torch.bfloat16, "p": 1}),
    "autocast of channels_last": Run(layers=convolutions, epochs=[images(6)], options={"autocast": torch.bfloat16}),
    "channels_last": Run(layers=convolutions, epochs=[images(6)]),
    "epochs, flushed between": Run(epochs=[rows(5), rows(0), rows(3), rows(1)], options={"p": 1}),
    "epochs, open groups": Run(epochs=[rows(5), rows(2)], options={"p": 1, "accumulate": 3}),
    "epochs without a flush": Run(
        epochs=[rows(3), rows(0), rows(4)], flush_between=False, options={"p": 1, "accumulate": 2}
    ),
    "fewer batches than the warm-up": Run(epochs=[rows(2)], options={"p": 1}),
    "one batch": Run(epochs=[rows(1)], options={"p": 1}),
    "no batch": Run(epochs=[rows(0)]),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_four_processes_compute_what_the_simulator_does(pool: Pool, run: Run) -> None:
    check(pool, run, 4)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_fifty_steps_with_pauses_are_the_simulators(pool: Pool, num_blocks: int) -> None:
    check(pool, Run(epochs=[rows(50)], delay_s=0.003, options={"p": 1, "seed": 9}), num_blocks)


def test_one_block_needs_no_other_process_and_is_plain_training() -> None:
    joined([part(0, 1, Run())]).check_is(plain(Run(), 1))


@st.composite
def staleness(draw: st.DrawFn) -> Staleness:
    num_blocks = draw(st.integers(2, 4))
    p = [draw(st.integers(0, 2)) for _ in range(num_blocks - 1)]
    q = [draw(st.integers(0, 2)) for _ in range(num_blocks - 1)]
    return Staleness.dsp(num_blocks, (*p, 0), (*q, 0), draw(st.sampled_from(["current", "stashed"])))


@settings(max_examples=15)
@given(
    spec=staleness(),
    num_batches=st.integers(0, 12),
    accumulate=st.integers(1, 3),
    optimizer=st.sampled_from([sgd, adamw, nadam]),
)
def test_any_staleness_at_any_speed_is_the_simulators(
    pool: Pool, spec: Staleness, num_batches: int, accumulate: int, optimizer: Callable[..., Any]
) -> None:
    options = {"m": spec, "accumulate": accumulate}
    check(pool, Run(epochs=[rows(num_batches)], optimizer=optimizer, delay_s=0.003, options=options), spec.K)
