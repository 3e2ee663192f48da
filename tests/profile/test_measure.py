"""What workers wrote, as the input of the model."""

import numpy as np

from stretto.profile.measure import later_batches
from stretto.profile.worker_logs import WorkerLog


def make_log(iteration: int, worker_id: int, begin: list[float], end: list[float]) -> WorkerLog:
    count = len(begin)
    return WorkerLog(
        loader=0,
        iteration=iteration,
        worker_id=worker_id,
        pid=10 + worker_id,
        stage_names=("read", "collate"),
        item_bytes=(1.0, 1.0),
        begin=np.array(begin),
        end=np.array(end),
        cpu_s=np.zeros(count),
        core_wait_s=np.zeros(count),
        num_examples=np.full(count, 4.0),
        num_bytes=np.full(count, 16.0),
        stage_wall_s=np.zeros((count, 2)),
        stage_cpu_s=np.zeros((count, 2)),
    )


def services(logs: list[WorkerLog]) -> list[list[float]]:
    return [(log.end - log.begin).tolist() for log in later_batches(logs)]


def test_each_workers_first_batch_of_an_iteration_is_part_of_the_start() -> None:
    logs = [
        make_log(1, 0, [0.0, 5.0, 6.0], [5.0, 6.0, 7.0]),
        make_log(1, 1, [0.5, 5.5], [5.5, 6.5]),
        make_log(1, 0, [7.0], [9.0]),  # the stages were others from here on
        make_log(2, 0, [10.0, 15.0], [15.0, 18.0]),
    ]
    assert services(logs) == [[1.0, 1.0], [1.0], [2.0], [3.0]]


def test_of_epochs_of_one_batch_a_worker_all_count() -> None:
    logs = [make_log(1, 0, [0.0], [5.0]), make_log(1, 1, [1.0], [5.0]), make_log(2, 0, [], [])]
    assert services(logs) == [[5.0], [4.0]]
