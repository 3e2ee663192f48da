"""What of this machine and installation will hurt a training run.

look()   reads the machine       -> Facts
judge()  knows what is too little -> Checks, each with what happens and what to do
"""

import importlib.metadata
import math
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass

from stretto.profile import cores

VERSION = 1
MIN_TORCH = (2, 6)
_TRAINERS = (
    "accelerate",
    "deepspeed",
    "fastai",
    "lightning",
    "mosaicml",
    "pytorch-ignite",
    "pytorch-lightning",
    "transformers",
)
_LOADERS = ("datasets", "torchdata", "torchvision", "webdataset")
_GIB = 1 << 30
_LOW_BYTES = _GIB  # of shared memory or on the disk
_LOW_MEMORY_BYTES = 2 * _GIB  # a worker takes some 0.3 GiB before it has read anything
_LOW_OPEN_FILES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """An NVIDIA GPU, as its driver reports it."""

    name: str
    driver: str
    memory_mib: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What an import of torch shows."""

    version: str
    threads: int
    sharing_strategy: str
    accelerator: str | None
    """The kind that a tensor could be put on: "cuda", "mps"; None without one."""
    cuda_build: str | None
    """The CUDA version that torch was built for."""
    cuda_error: str | None
    """Why CUDA does not start, as torch says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What was found."""

    packages: dict[str, str]
    """Versions by distribution, with "python"."""
    torch: Torch | None
    torch_error: str | None
    """Why torch cannot be imported."""
    cores_seen: int
    """os.cpu_count()."""
    cores_allowed: int
    cores_quota: float | None
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    shared_memory: cores.SharedMemory | None
    start_method: str
    open_files: int
    """The soft limit; -1 without a limit."""
    omp_num_threads: str | None
    gpus: tuple[Gpu, ...]
    temp_folder: str
    temp_free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    value: str
    hurts: str | None = None
    """What will happen, and what to do; None if it is as it should be."""


def look() -> Facts:
    """Read this machine."""
    import psutil  # noqa: PLC0415  (the command line's help need not wait for it)

    found, error = _look_at_torch()
    memory = psutil.virtual_memory()
    return Facts(
        packages=_packages(),
        torch=found,
        torch_error=error,
        cores_seen=os.cpu_count() or 1,
        cores_allowed=cores.allowed_cores(),
        cores_quota=cores.quota_cores(),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=cores.memory_limit_bytes(),
        shared_memory=cores.shared_memory_bytes(),
        start_method=multiprocessing.get_context().get_start_method(),
        open_files=_open_files(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        gpus=_gpus(),
        temp_folder=tempfile.gettempdir(),
        temp_free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
    )


def judge(facts: Facts) -> list[Check]:
    """Every fact with its mark."""
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    return [
        Check(name="versions", value=packages),
        _judge_torch(facts),
        _judge_cores(facts),
        *_judge_threads(facts),
        _judge_memory(facts),
        *_judge_shared_memory(facts),
        _judge_start_method(facts),
        _judge_open_files(facts),
        _judge_gpu(facts),
        Check(
            name="temporary files",
            value=f"{_size(facts.temp_free_bytes)} free in {facts.temp_folder}",
            hurts="Records and spilled data will not fit: set TMPDIR to a folder with more room."
            if facts.temp_free_bytes < _LOW_BYTES
            else None,
        ),
    ]


def torch_is_usable(facts: Facts) -> bool:
    """Whether torch can be imported and is new enough."""
    return facts.torch is not None and _numbers(facts.torch.version) >= MIN_TORCH


def verdict(checks: list[Check]) -> str:
    """How many of them hurt, in a sentence."""
    num_hurting = sum(check.hurts is not None for check in checks)
    if num_hurting == 0:
        return "Nothing here will hurt."
    return f"{num_hurting} thing{'s' if num_hurting > 1 else ''} will hurt."


def _judge_torch(facts: Facts) -> Check:
    needed = ".".join(map(str, MIN_TORCH))
    if facts.torch is None:
        missing = f"torch cannot be imported, so nothing will run: pip install 'torch>={needed}'."
        return Check(name="torch", value=facts.torch_error or "missing", hurts=missing)
    is_new = torch_is_usable(facts)
    hurts = None if is_new else f"stretto needs torch {needed} or newer: pip install 'torch>={needed}'."
    return Check(name="torch", value=facts.torch.version, hurts=hurts)


def _judge_cores(facts: Facts) -> Check:
    seen, allowed, quota = facts.cores_seen, facts.cores_allowed, facts.cores_quota
    value = f"{seen} seen, {allowed} allowed, " + ("no quota" if quota is None else f"quota {quota:g}")
    hurts = None
    if quota is not None and quota < allowed:
        hurts = (
            f"torch and os.cpu_count() will start threads and workers for {allowed} cores, and the quota then "
            f"stops all of them for a part of every period: set num_workers and OMP_NUM_THREADS by {quota:g}."
        )
    elif allowed < seen:
        hurts = (
            f"Scripts that take os.cpu_count() will start workers for {seen} cores, which take turns on {allowed}: "
            f"set num_workers to at most {allowed}."
        )
    return Check(name="cores", value=value, hurts=hurts)


def _judge_threads(facts: Facts) -> list[Check]:
    if facts.torch is None:
        return []
    usable = min(facts.cores_allowed, facts.cores_quota or facts.cores_allowed)
    whole = max(1, math.floor(usable))
    hurts = None
    if facts.torch.threads > math.ceil(usable):
        hurts = (
            f"{facts.torch.threads} threads of torch take turns on {usable:g} cores, so every update waits for the "
            f"slowest: export OMP_NUM_THREADS={whole}."
        )
    variable = "not set" if facts.omp_num_threads is None else facts.omp_num_threads
    return [Check(name="threads", value=f"torch {facts.torch.threads}, OMP_NUM_THREADS {variable}", hurts=hurts)]


def _judge_memory(facts: Facts) -> Check:
    limit = facts.memory_limit_bytes
    value = f"{_size(facts.memory_bytes)}, {_size(facts.memory_available_bytes)} available, "
    value += "no limit" if limit is None else f"limit {_size(limit)}"
    hurts = None
    if min(facts.memory_available_bytes, limit or facts.memory_available_bytes) < _LOW_MEMORY_BYTES:
        hurts = (
            "The kernel kills workers when it runs out (DataLoader worker is killed by signal: Killed): "
            "use fewer workers, or raise the limit."
        )
    return Check(name="memory", value=value, hurts=hurts)


def _judge_shared_memory(facts: Facts) -> list[Check]:
    if facts.shared_memory is None:
        return []
    size, free = facts.shared_memory
    hurts = None
    if free < _LOW_BYTES:
        remedy = (
            "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm"
            if size < 2 * _LOW_BYTES
            else "remove from /dev/shm what ended processes left there"
        )
        hurts = f"Workers that send batches through it die with a bus error when it is full: {remedy}."
    return [Check(name="shared memory", value=f"{_size(size)}, {_size(free)} free", hurts=hurts)]


def _judge_start_method(facts: Facts) -> Check:
    hurts = None
    if facts.start_method != "fork":
        hurts = (
            "Data sets must pickle, and every worker starts slowly because it imports the script again: keep "
            'persistent_workers=True and the start under `if __name__ == "__main__":`.'
        )
    return Check(name="start method", value=facts.start_method, hurts=hurts)


def _judge_open_files(facts: Facts) -> Check:
    value = "no limit" if facts.open_files < 0 else f"at most {facts.open_files:,}"
    hurts = None
    if facts.torch is not None:
        value += f", torch shares tensors by {facts.torch.sharing_strategy}"
        if 0 <= facts.open_files < _LOW_OPEN_FILES and facts.torch.sharing_strategy == "file_descriptor":
            hurts = (
                "Every tensor that a worker sends holds a file open, so batches that are kept end in "
                "`Too many open files`: ulimit -n 65536."
            )
    return Check(name="open files", value=value, hurts=hurts)


def _judge_gpu(facts: Facts) -> Check:
    names = [f"{gpu.name} ({gpu.memory_mib} MiB, driver {gpu.driver})" for gpu in facts.gpus]
    accelerator = None if facts.torch is None else facts.torch.accelerator
    value = ", ".join(names) or "none"
    hurts = None
    if accelerator is not None:
        value = f"{accelerator} is usable" + (f": {value}" if names else "")
    elif facts.torch is not None and names:
        reason = facts.torch.cuda_error or "torch finds no device, see CUDA_VISIBLE_DEVICES"
        remedy = f"CUDA does not start ({reason}): bring the driver and torch's CUDA version together"
        if facts.torch.cuda_build is None:
            remedy = f"torch {facts.torch.version} was built without CUDA: install a build with it, see pytorch.org"
        hurts = f"Training will run on the CPU. {remedy}."
    return Check(name="GPU", value=value, hurts=hurts)


def _look_at_torch() -> tuple[Torch | None, str | None]:
    try:
        import torch  # noqa: PLC0415  (what a broken installation raises is a finding)
        import torch.multiprocessing  # noqa: PLC0415
    except (ImportError, OSError) as error:  # a missing library of the system is an OSError
        return None, f"{type(error).__name__}: {error}"
    accelerator, cuda_error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            try:
                torch.zeros(1, device="cuda")
                accelerator = "cuda"
            except RuntimeError as error:
                cuda_error = str(error)
        elif torch.backends.mps.is_available():
            accelerator = "mps"
    if accelerator is None and cuda_error is None and caught:
        cuda_error = str(caught[-1].message)
    return (
        Torch(
            version=str(torch.__version__),
            threads=torch.get_num_threads(),
            sharing_strategy=torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
            accelerator=accelerator,
            cuda_build=torch.version.cuda,
            cuda_error=cuda_error and cuda_error.strip().splitlines()[0],
        ),
        None,
    )


def _packages() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("stretto", "torch", "numpy", *_LOADERS, *_TRAINERS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[Gpu, ...]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, or one that does not answer
        return ()
    rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines()]
    return tuple(Gpu(name=row[0], driver=row[1], memory_mib=row[2]) for row in rows if len(row) == 3)


def _open_files() -> int:
    try:
        import resource  # noqa: PLC0415  (POSIX)
    except ImportError:
        return -1
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _numbers(version: str) -> tuple[int, ...]:
    """2, 6 of "2.6.0+cu124"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _size(num_bytes: int) -> str:
    if num_bytes < _GIB:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / _GIB:.1f} GiB"
