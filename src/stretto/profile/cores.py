"""What this process may really use of the machine: cores, memory, shared memory.

`os.cpu_count()` counts the machine's cores. A process may be bound to some of them (its affinity), and a container
gets a quota: so much core time in each period, whatever the number of cores. Both are read here, for control
groups of version 1 and 2, of the process's own group and all groups above it that can be seen.

The functions that read files take the folder in which /proc and /sys lie.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
_MOST_BYTES = 1 << 60  # version 1 says "no limit" with a number near 2^63


class SharedMemory(NamedTuple):
    """Of /dev/shm, in bytes."""

    size: int
    free: int


def usable_cores(root: Path = ROOT) -> float:
    """Cores that this process may use: its affinity, or its control group's quota if that is less."""
    quota = quota_cores(root)
    return float(allowed_cores()) if quota is None else min(float(allowed_cores()), quota)


def allowed_cores() -> int:
    """Cores that this process may run on; all of the machine's where the system has no affinity (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota_cores(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the control groups grant; None without a quota."""
    quotas = []
    for folder in _folders(root, "cpu"):
        limit = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        numbers = [int(word) for word in limit if word.isdecimal()]  # without a quota "max" or -1 stands there
        if len(numbers) == 2 and numbers[1] > 0:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The control groups' limit of memory; None without one."""
    words = [
        word
        for folder in _folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        for word in _words(folder / name)
    ]
    limits = [int(word) for word in words if word.isdecimal() and int(word) < _MOST_BYTES]
    return min(limits, default=None)


def shared_memory_bytes(root: Path = ROOT) -> SharedMemory | None:
    """Size and free space of /dev/shm; None where the system has none (macOS)."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it, in each mounted hierarchy with `controller`.

    A line of /proc/self/cgroup is "id:controllers:path", of version 2 "0::path". The path starts at the
    hierarchy's root, of which a container often sees a part: the part that is mounted (field 4 of mountinfo).
    """
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if controller in names.split(",") or not names:
            paths["cgroup" if names else "cgroup2"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        fields = line.split()
        mounted, mount_point = (_unescaped(field) for field in fields[3:5])
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        is_meant = kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))
        if not is_meant or kind not in paths:
            continue
        top = root / mount_point.lstrip("/")
        group = paths[kind]
        inner = group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()
        if ".." in inner.parts:  # the group lies outside the container's view
            inner = PurePosixPath()
        yield from (top / part for part in (inner, *inner.parents))


def _unescaped(field: str) -> str:
    """A path of mountinfo, in which a space is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
