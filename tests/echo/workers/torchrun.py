"""Runs a script on two ranks under torchrun, and gives back what each of them wrote."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
KILL_AFTER_S = 150


def start(script: str, *args: object, is_torchrun: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script of `scripts/` to its end, with all of its children."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if is_torchrun else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(SCRIPTS / script), *map(str, args)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are sessions of their own
            out, err = process.communicate(timeout=30)
            raise AssertionError(f"{script} did not end within {KILL_AFTER_S} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def results_of(script: str, folder: Path, *args: object, is_torchrun: bool = True) -> list[dict[str, Any]]:
    """What the ranks wrote with `common.write`."""
    done = start(script, folder, *args, is_torchrun=is_torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
