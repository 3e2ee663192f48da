"""Rows of a process as fetches of training batches: where each second goes."""

from pathlib import Path

import numpy as np
import pytest

from stretto.profile.iteration import NUM_COLUMNS, Kind
from stretto.profile.rows import RowWriter
from stretto.profile.timeline import Timeline, read_timeline

TRAINING, VALIDATION, OTHER_TRAINING = 0, 1, 2


class Script:
    """Writes the rows of a process second by second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 100.0
        self._rows = RowWriter(path, NUM_COLUMNS, {})
        self._num_iterations = 0

    def iterate(self, loader: int, seconds: float = 0.0, *, with_gradients: bool = True) -> tuple[int, int]:
        self._num_iterations += 1
        self._write(Kind.ITER, loader, self._num_iterations, seconds, float(with_gradients))
        return loader, self._num_iterations

    def fetch(self, iteration: tuple[int, int], seconds: float, queued: int = -1) -> None:
        self._write(Kind.FETCH, *iteration, seconds, queued)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self._write(Kind.STEP, 0, 0, 0.0, 1)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def end(self, iteration: tuple[int, int], kind: Kind = Kind.END) -> None:
        self._write(kind, *iteration, 0.0, 0)

    def read(self, *training: int) -> Timeline:
        self._rows.close()
        return read_timeline(self.path, set(training))

    def _write(self, kind: Kind, loader: int, iteration: int, seconds: float, value: float) -> None:
        begin = self.now
        self.now += seconds
        self._rows.write(kind, loader, iteration, begin, self.now, begin / 2, self.now / 2, value)

    def stall(self, begin: float, seconds: float) -> None:
        self._rows.write(Kind.STALL, TRAINING, 0, begin, self.now, 0, 0, seconds)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "rank-1.rows")


def test_waits_steps_and_what_lies_between_epochs_add_up_to_the_total(script: Script) -> None:
    for _ in range(2):
        epoch = script.iterate(TRAINING, 0.5)
        for _ in range(3):
            script.fetch(epoch, 2.0)
            script.step(1.0)
            script.work(0.25)
        script.end(epoch)
        script.work(7.0)  # a checkpoint
    timeline = script.read(TRAINING)
    assert timeline.wait.tolist() == [2.5, 2.0, 2.0, 2.5, 2.0, 2.0]
    assert timeline.is_first.tolist() == [True, False, False, True, False, False]
    assert timeline.step.tolist() == [1.25] * 6
    assert timeline.other.tolist() == [0, 0, 7.0, 0, 0, 0]
    assert timeline.total_s == timeline.wait.sum() + timeline.step.sum() + 7.0
    assert timeline.num_updates == 6
    assert timeline.step_cpu.tolist() == pytest.approx([0.625, 0.625, 4.375, 0.625, 0.625, 0.0])


def test_validation_in_the_middle_of_an_epoch_is_not_part_of_a_step(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    script.fetch(epoch, 1.0)
    script.step(1.0)
    check = script.iterate(VALIDATION, with_gradients=False)
    for _ in range(4):
        script.fetch(check, 0.5)
        script.work(0.25)
    script.end(check)
    script.work(0.5)
    script.fetch(epoch, 1.0)
    script.step(1.0)
    script.end(epoch)
    timeline = script.read(TRAINING)
    assert timeline.step.tolist() == [1.0, 1.0]
    assert timeline.other.tolist() == [3.5, 0.0]  # with what followed before the next fetch


def test_a_batch_of_another_loader_before_the_step_is_not_the_end_of_it(script: Script) -> None:
    epoch, extra = script.iterate(TRAINING), script.iterate(VALIDATION, with_gradients=False)
    for _ in range(3):
        script.fetch(epoch, 1.0)
        script.fetch(extra, 0.5)
        script.step(2.0)
    script.end(epoch)
    assert script.read(TRAINING).step.tolist() == [2.0] * 3


def test_an_evaluation_over_the_training_loader_is_not_training(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    for _ in range(2):
        script.fetch(epoch, 1.0)
        script.step(1.0)
    script.end(epoch)
    check = script.iterate(TRAINING, with_gradients=False)
    script.fetch(check, 1.0)
    script.end(check)
    assert len(script.read(TRAINING).begin) == 2


def test_accumulation_makes_one_update_of_several_batches(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    for at in range(6):
        script.fetch(epoch, 1.0)
        if at % 3 == 2:
            script.step(1.0)
        else:
            script.work(1.0)
    timeline = script.read(TRAINING)
    assert timeline.steps.tolist() == [0, 0, 1, 0, 0, 1]
    assert timeline.num_updates == 2


def test_two_optimizers_that_step_on_one_batch_make_one_update(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    for _ in range(3):
        script.fetch(epoch, 1.0)
        script.step(0.5)
        script.step(0.5)
    timeline = script.read(TRAINING)
    assert timeline.num_updates == 3
    assert int(timeline.steps.sum()) == 6


def test_zipped_loaders_wait_each_for_itself_and_behind_each_other(script: Script) -> None:
    first, second = script.iterate(TRAINING), script.iterate(OTHER_TRAINING)
    for _ in range(3):
        script.fetch(first, 1.0)
        script.fetch(second, 3.0)
        script.step(2.0)
    timeline = script.read(TRAINING, OTHER_TRAINING)
    assert timeline.num_updates == 3
    for loader, wait, step in ((TRAINING, 1.0, [5.0, 5.0, 5.0]), (OTHER_TRAINING, 3.0, [3.0, 3.0, 2.0])):
        mine = timeline.of(loader)
        assert mine.wait.tolist() == [wait] * 3
        assert mine.step.tolist() == step
        assert mine.num_updates == 3


def test_a_wait_that_an_accelerator_did_not_see_is_part_of_the_step(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    script.fetch(epoch, 1.0)
    script.step(1.0)
    begin = script.now
    script.fetch(epoch, 3.0)
    script.step(1.0)
    script.stall(begin, 0.5)
    script.end(epoch)
    timeline = script.read(TRAINING)
    assert timeline.wait.tolist() == [1.0, 0.5]
    assert timeline.step.tolist() == [1.0, 3.5]
    assert timeline.total_s == 6.0


def test_a_process_that_was_killed_in_a_step_is_read_up_to_its_last_row(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    script.fetch(epoch, 1.0)
    script.step(1.0)
    script.fetch(epoch, 1.0)
    timeline = script.read(TRAINING)
    assert timeline.step.tolist() == [1.0, 0.0]
    assert timeline.num_updates == 1


def test_what_was_ready_and_what_is_not_known(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    for queued in (3, 0, -1):
        script.fetch(epoch, 1.0, queued)
        script.step(1.0)
    queued = script.read(TRAINING).queued
    assert queued[:2].tolist() == [3, 0]
    assert np.isnan(queued[2])


def test_what_this_process_computed_while_it_waited(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    for seconds in (2.0, 4.0):
        script.fetch(epoch, seconds)
        script.step(1.0)
    assert script.read(TRAINING).wait_cpu.tolist() == [1.0, 2.0]  # it computes half of the time


def test_a_loader_that_never_trained_has_no_timeline(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    script.fetch(epoch, 1.0)
    timeline = script.read(TRAINING)
    assert len(timeline.begin) == 0
    assert timeline.total_s == 0
    assert timeline.num_updates == 0


def test_loaders_that_follow_each_other_have_each_its_own_steps(script: Script) -> None:
    """A script may make a loader anew for each epoch."""
    for loader in (TRAINING, OTHER_TRAINING):
        epoch = script.iterate(loader)
        for _ in range(2):
            script.fetch(epoch, 1.0)
            script.step(2.0)
        script.end(epoch)
        script.work(5.0)
    timeline = script.read(TRAINING, OTHER_TRAINING)
    for loader in (TRAINING, OTHER_TRAINING):
        mine = timeline.of(loader)
        assert mine.step.tolist() == [2.0, 2.0]
        assert mine.updates.tolist() == mine.steps.tolist() == [1, 1]
    assert timeline.of(TRAINING).other.tolist() == [0.0, 5.0]


def test_what_a_script_does_with_its_iterator_in_hand_after_training_is_no_step(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    for _ in range(2):
        script.fetch(epoch, 1.0)
        script.step(2.0)
    script.work(50.0)  # a checkpoint
    script.end(epoch, Kind.LEFT)
    assert script.read(TRAINING).step.tolist() == [2.0, 2.0]


def test_a_batch_without_a_step_lasts_until_its_iteration_is_left(script: Script) -> None:
    epoch = script.iterate(TRAINING)
    script.fetch(epoch, 1.0)
    script.step(2.0)
    script.fetch(epoch, 1.0)
    script.work(0.5)
    script.end(epoch, Kind.LEFT)
    assert script.read(TRAINING).step.tolist() == [2.0, 0.5]


def test_a_validation_that_goes_on_from_step_to_step_counts_where_it_runs(script: Script) -> None:
    epoch, check = script.iterate(TRAINING), script.iterate(VALIDATION, with_gradients=False)
    for _ in range(3):
        script.fetch(epoch, 1.0)
        script.step(2.0)
        script.fetch(check, 0.25)
        script.work(0.5)
    script.end(epoch)
    timeline = script.read(TRAINING)
    assert timeline.other.tolist() == [0.75] * 3  # with what is done with its batch
    assert timeline.step.tolist() == [2.0] * 3


@pytest.mark.parametrize("data", [None, b'{"num_col'])
def test_a_process_without_rows_has_no_timeline(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "rank-1.rows"
    if data is not None:
        path.write_bytes(data)
    timeline = read_timeline(path, {TRAINING})
    assert len(timeline.begin) == len(timeline.updates) == timeline.num_updates == 0
