"""Cores and memory, from the files of control groups as Linux writes them."""

import os
from pathlib import Path

import pytest

from stretto.profile.cores import (
    allowed_cores,
    memory_limit_bytes,
    quota_cores,
    shared_memory_bytes,
    usable_cores,
)

MOUNT_2 = "30 24 0:27 {part} /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate"
MOUNT_1 = "32 31 0:29 {part} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
MEMORY_1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
OTHER = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"


def tree(root: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> Path:
    contents = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join([OTHER, *mounts]) + "\n", **files}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_quota_of_version_2_counts_in_cores(tmp_path: Path) -> None:
    mounts = [MOUNT_2.format(part="/")]
    root = tree(tmp_path, "0::/job\n", mounts, {"sys/fs/cgroup/job/cpu.max": "150000 100000\n"})
    assert quota_cores(root) == 1.5
    assert usable_cores(root) == min(1.5, len(os.sched_getaffinity(0)))


def test_the_smallest_quota_of_a_group_and_those_above_it_holds(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/fs/cgroup/user/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/user/job/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/other/cpu.max": "1000 100000\n",
        "sys/fs/cgroup/user/memory.max": "1073741824\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
    }
    root = tree(tmp_path, "0::/user/job\n", [MOUNT_2.format(part="/")], files)
    assert quota_cores(root) == 0.5
    assert memory_limit_bytes(root) == 1 << 30


def test_no_quota_leaves_the_affinity(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "max 100000\n"}
    root = tree(tmp_path, "0::/\n", [MOUNT_2.format(part="/")], files)
    assert quota_cores(root) is None
    assert usable_cores(root) == allowed_cores() == len(os.sched_getaffinity(0))


def test_a_quota_of_version_1_counts_in_cores(tmp_path: Path) -> None:
    cgroup = "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/elsewhere\n0::/\n"
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "50000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "536870912\n",
    }
    root = tree(tmp_path, cgroup, [MOUNT_1.format(part="/"), MEMORY_1], files)
    assert quota_cores(root) == 5.0
    assert memory_limit_bytes(root) == 1 << 29


@pytest.mark.parametrize(("part", "inner"), [("/docker/1a2b", "sub/"), ("/docker/1a2b/sub", "")])
def test_a_container_that_sees_a_part_of_the_hierarchy_finds_its_group_in_it(
    tmp_path: Path, part: str, inner: str
) -> None:
    files = {
        f"sys/fs/cgroup/cpu,cpuacct/{inner}cpu.cfs_quota_us": "300000\n",
        f"sys/fs/cgroup/cpu,cpuacct/{inner}cpu.cfs_period_us": "100000\n",
    }
    cgroup = "4:cpu,cpuacct:/docker/1a2b/sub\n"
    assert quota_cores(tree(tmp_path, cgroup, [MOUNT_1.format(part=part)], files)) == 3.0


@pytest.mark.parametrize(("part", "path"), [("/", "/../../elsewhere"), ("/a", "/b")])
def test_a_group_outside_the_view_falls_back_to_what_is_mounted(tmp_path: Path, part: str, path: str) -> None:
    files = {"sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert quota_cores(tree(tmp_path, f"0::{path}\n", [MOUNT_2.format(part=part)], files)) == 2.0


def test_a_mount_point_with_a_space_is_found(tmp_path: Path) -> None:
    mount = "30 24 0:27 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw"
    assert quota_cores(tree(tmp_path, "0::/\n", [mount], {"sys/fs/c group/cpu.max": "200000 100000\n"})) == 2.0


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert quota_cores(tmp_path) is None
    assert memory_limit_bytes(tmp_path) is None
    assert shared_memory_bytes(tmp_path) is None


def test_shared_memory_is_that_of_the_file_system(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = shared_memory_bytes(tmp_path)
    assert found is not None
    assert found.size == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert 0 <= found.free <= found.size
