"""Runs a script on two ranks, with what torchrun gives them, and hands back what each of them wrote."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.forked import python
from tests.patience import PATIENCE_S
from tests.ports import held_port

ROOT = Path(__file__).parents[3]
SCRIPTS = "tests.echo.workers.scripts"
WORLD_SIZE = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def torchrun(script: str) -> "subprocess.CompletedProcess[str]":
    """Run a script of `scripts/` under torchrun itself to its end."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", WORLD_SIZE]
    return python("-m", *launcher, "-m", f"{SCRIPTS}.{script}", cwd=ROOT, **ENVIRONMENT)


def results_of(script: str, folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote with `common.write`."""
    done = python("-m", __name__, script, folder, cwd=ROOT, **ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def run_ranks(script: str) -> int:
    """Run the script's `main` in ranks forked from here, so that what it imports is imported once.

    Returns 0 if all of them succeeded.
    """
    main = importlib.import_module(f"{SCRIPTS}.{script}").main
    with held_port() as port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests")
        os.environ.update(WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE))
        ranks = []
        for number in range(WORLD_SIZE):
            os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
            ranks.append(multiprocessing.get_context("fork").Process(target=main))
            ranks[-1].start()
        for rank in ranks:
            rank.join(PATIENCE_S / 2)
            if rank.exitcode != 0:
                for other in ranks:
                    other.kill()
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_ranks(sys.argv[1]))
