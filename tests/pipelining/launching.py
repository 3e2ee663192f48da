"""Scripts on several processes, started as a user does: by hand, or by torchrun.

By hand they are forked from a process that has imported torch, run under the name __main__, and end as any
interpreter does, with its threads, its exit functions and its modules.
"""

import ctypes
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.forked import python
from tests.ports import held_port

ROOT = Path(__file__).parents[2]
Completed = subprocess.CompletedProcess[str]


def by_hand(script: str, world: int, *arguments: object) -> list[Completed]:
    """Run a script of `scripts/` in `world` processes. Raises AssertionError if one does not end in time."""

    def run(rank: int, port: int) -> Completed:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return python("-m", __name__, script, *arguments, cwd=ROOT, **variables)

    with held_port() as port, ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world), [port] * world))


def by_torchrun(script: str, world: int, *arguments: object) -> Completed:
    """Run a script of `scripts/` as `torchrun` does, in new processes."""
    path = ROOT / "tests" / "pipelining" / "scripts" / f"{script}.py"
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world, path, *arguments)
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return python(*command, cwd=ROOT, **variables)


def _main() -> None:
    code: object = 0
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(f"tests.pipelining.scripts.{sys.argv[0]}", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    ctypes.pythonapi.Py_Exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    _main()
