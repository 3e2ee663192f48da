"""What hurts, of machines as they are found, and the command on this one."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.profile.cores import SharedMemory
from stretto.profile.doctor import MIN_TORCH, Facts, Gpu, Torch, judge, look, torch_is_usable, verdict
from tests.forked import python
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
TORCH = Torch(
    version="2.9.1+cu128",
    threads=8,
    sharing_strategy="file_descriptor",
    accelerator="cuda",
    cuda_build="12.8",
    cuda_error=None,
)
GOOD = Facts(
    packages={"python": "3.12.3", "stretto": "0.1.0", "torch": "2.9.1"},
    torch=TORCH,
    torch_error=None,
    cores_seen=8,
    cores_allowed=8,
    cores_quota=None,
    memory_bytes=64 * GIB,
    memory_available_bytes=60 * GIB,
    memory_limit_bytes=None,
    shared_memory=SharedMemory(32 * GIB, 32 * GIB),
    start_method="fork",
    open_files=65536,
    omp_num_threads=None,
    gpus=(Gpu(name="NVIDIA L4", driver="550.54", memory_mib="23034"),),
    temp_folder="/tmp",
    temp_free_bytes=50 * GIB,
)


def hurting(facts: Facts) -> dict[str, str]:
    return {check.name: check.hurts for check in judge(facts) if check.hurts is not None}


def test_nothing_hurts_on_a_good_machine() -> None:
    assert hurting(GOOD) == {}
    assert verdict(judge(GOOD)) == "Nothing here will hurt."
    values = {check.name: check.value for check in judge(GOOD)}
    assert values["cores"] == "8 seen, 8 allowed, no quota"
    assert values["GPU"] == "cuda is usable: NVIDIA L4 (23034 MiB, driver 550.54)"


def test_a_system_without_shared_memory_and_limits_is_not_blamed_for_it() -> None:
    facts = replace(GOOD, shared_memory=None, open_files=-1, gpus=(), torch=replace(TORCH, accelerator="mps"))
    assert hurting(facts) == {}
    assert {check.name: check.value for check in judge(facts)}["GPU"] == "mps is usable"


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"shared_memory": SharedMemory(64 << 20, 64 << 20)}, "shared memory", "bus error.*--shm-size=8g"),
        ({"shared_memory": SharedMemory(32 * GIB, 1 << 20)}, "shared memory", "remove from /dev/shm"),
        ({"cores_quota": 7.5}, "cores", "for 8 cores.*by 7.5"),
        ({"cores_seen": 64}, "cores", "workers for 64 cores.*at most 8"),
        ({"torch": replace(TORCH, threads=9)}, "threads", "9 threads.*OMP_NUM_THREADS=8"),
        ({"memory_available_bytes": GIB}, "memory", "kills workers"),
        ({"memory_limit_bytes": GIB}, "memory", "kills workers"),
        ({"start_method": "spawn"}, "start method", "must pickle"),
        ({"start_method": "forkserver"}, "start method", "must pickle"),
        ({"open_files": 256}, "open files", "Too many open files.*ulimit -n"),
        ({"temp_free_bytes": GIB // 2}, "temporary files", "TMPDIR"),
        ({"torch": replace(TORCH, accelerator=None, cuda_build=None)}, "GPU", "built without CUDA"),
        ({"torch": replace(TORCH, accelerator=None, cuda_error="driver too old")}, "GPU", "driver too old"),
        ({"torch": replace(TORCH, version="2.5.1")}, "torch", "torch 2.6 or newer"),
        ({"torch": None, "torch_error": "ImportError: libc10.so"}, "torch", "cannot be imported"),
    ],
)
def test_each_thing_that_hurts_says_what_happens_and_what_to_do(changes: dict, name: str, says: str) -> None:
    found = hurting(replace(GOOD, **changes))
    assert list(found) == [name]
    assert re.search(says, found[name])
    assert verdict(judge(replace(GOOD, **changes))) == "1 thing will hurt."


def test_a_small_quota_hurts_twice_through_the_cores_and_the_threads() -> None:
    facts = replace(GOOD, cores_quota=0.5)
    assert list(hurting(facts)) == ["cores", "threads"]
    assert "take turns on 0.5 cores" in hurting(facts)["threads"]
    assert "OMP_NUM_THREADS=1." in hurting(facts)["threads"]
    assert verdict(judge(facts)) == "2 things will hurt."


def test_more_threads_than_a_fraction_of_a_core_needs_are_too_many_only_above_the_next_whole_one() -> None:
    facts = replace(GOOD, cores_quota=7.5, torch=replace(TORCH, threads=8))
    assert list(hurting(facts)) == ["cores"]


@pytest.mark.parametrize(("version", "usable"), [("2.6.0", True), ("2.13.0+cpu", True), ("2.5.9", False)])
def test_torch_is_usable_from_the_version_that_the_package_asks_for(version: str, usable: bool) -> None:
    assert torch_is_usable(replace(GOOD, torch=replace(TORCH, version=version))) is usable
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}" in project["dependencies"]


def test_this_machine_is_read() -> None:
    facts = look()
    assert facts.torch is not None
    assert facts.cores_seen == os.cpu_count()
    assert facts.packages["torch"] == facts.torch.version
    assert 0 < facts.memory_available_bytes <= facts.memory_bytes
    assert facts.temp_free_bytes > 0


def code(before: str = "pass") -> str:
    return f"from stretto.cli.main import app; {before}; app()"


def test_the_command_says_the_verdict_first_and_writes_the_record(tmp_path: Path) -> None:
    few_files = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    command = [sys.executable, "-c", code(few_files), "doctor", "--json", tmp_path / "doctor.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "doctor.json").read_text())
    first, *rows = done.stdout.splitlines()
    assert first == record["verdict"]
    assert rows[0].startswith("hurts")
    assert "\x1b" not in done.stdout
    checks = {check["name"]: check for check in record["checks"]}
    assert checks["threads"]["value"] == "torch 1, OMP_NUM_THREADS 1"
    assert checks["open files"]["value"] == "at most 256, torch shares tensors by file_descriptor"
    assert checks["open files"]["hurts"] in " ".join(done.stdout.split())


def test_a_dash_prints_the_record_alone() -> None:
    done = python("-c", code(), "doctor", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 1


def test_a_torch_that_cannot_be_imported_ends_with_exit_code_1() -> None:
    done = python("-c", code("import sys; sys.modules['torch'] = None"), "doctor")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "torch cannot be imported, so nothing will run" in done.stdout


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = python("-c", code(), "doctor", "--json", tmp_path / "absent" / "doctor.json")
    assert done.returncode == 2
    assert done.stderr.startswith(f"stretto doctor: {tmp_path}")
    assert done.stdout == ""
