"""Python commands in processes forked from one that has imported torch and stretto: two seconds less each.

pytest --starts--> server (torch, stretto) --forks--> python [-c CODE | -m MODULE | SCRIPT] ARGUMENTS
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.patience import PATIENCE_S

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.run", "stretto.cli.main", "tests.forked"])


def python(
    *arguments: object, cwd: Path | None = None, timeout_s: float = PATIENCE_S, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command of Python's to its end, with `variables` in its environment and nothing to read."""
    command = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        environment = {**os.environ, **variables}
        process = _SERVER.Process(target=_run, args=(command, streams, cwd or Path.cwd(), environment))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"{command} did not end within {timeout_s} s")
        assert process.exitcode is not None
        out, err = (path.read_bytes().decode() for path in streams)
        return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _run(command: list[str], streams: list[Path], cwd: Path, environment: Mapping[str, str]) -> None:
    gc.freeze()  # a collection need not look through all that was imported
    multiprocessing.set_start_method(None, force=True)  # the platform's, as if this had not come from a server
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as TMPDIR says
    if "OMP_NUM_THREADS" in environment:  # which torch read when it was imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.chdir(cwd)
    for number, path in enumerate(streams, 1):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    first, *rest = command
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(cwd))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = [first, *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
