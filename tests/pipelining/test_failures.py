"""What fails in one process ends all of them, as a shell sees it: within seconds, not well, and with the cause."""

import pytest

from tests.pipelining.launching import Completed, by_hand, by_torchrun

BARRIER = pytest.mark.parametrize("barrier", [(), ("barrier",)], ids=["", "barrier"])


def check(found: list[Completed], where: int, code: int, cause: str) -> None:
    """All ended by themselves, as no launcher did it; rank `where` with `code`, the others with `cause`."""
    assert [one.returncode for one in found] == [code if rank == where else 1 for rank in range(3)]
    for rank, one in enumerate(found):
        assert "terminate called" not in one.stderr
        if rank != where:
            assert f"BlockFailed: rank {where} failed:" in one.stderr
            assert cause in one.stderr


@BARRIER
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_killed_process_ends_all(where: int, barrier: tuple[str, ...]) -> None:
    found = by_hand("failing", 3, "kill", where, *barrier)
    check(found, where, -9, "its process ended without a word, or the connection to it broke")


def test_a_process_that_exits_in_a_block_ends_all() -> None:
    check(by_hand("failing", 3, "exit", 1), 1, 3, "SystemExit: 3")


@BARRIER
def test_a_block_that_raises_ends_all(barrier: tuple[str, ...]) -> None:
    found = by_hand("failing", 3, "block", 1, *barrier)
    check(found, 1, 1, "ValueError: the block broke")
    assert "ValueError: the block broke" in found[1].stderr


def test_a_loader_that_raises_ends_all() -> None:
    check(by_hand("failing", 3, "loader", 0, "barrier"), 0, 1, "KeyError: 'the loader broke'")


def test_a_script_that_raises_ends_all() -> None:
    check(by_hand("failing", 3, "user", 2, "barrier"), 2, 1, "OSError: the script broke")


@pytest.mark.parametrize("where", [0, 2])
def test_a_process_that_leaves_before_the_end_ends_all(where: int) -> None:
    check(by_hand("failing", 3, "leave", where), where, 0, "it left the pipeline before flush()")


def test_a_run_that_does_not_fail_ends_well() -> None:
    found = by_hand("failing", 3, "none", 0, "barrier")
    assert [(one.returncode, one.stderr) for one in found] == [(0, "")] * 3


@pytest.mark.parametrize(("mode", "where", "cause"), [("block", 1, "the block broke"), ("kill", 0, "exitcode: -9")])
def test_torchrun_ends_with_the_cause(mode: str, where: int, cause: str) -> None:
    found = by_torchrun("failing", 2, mode, where, "barrier")
    assert found.returncode == 1
    assert cause in found.stderr
    assert "terminate called" not in found.stderr
