"""A pool of processes that run functions together, over gloo: started once, used by many tests.

    pool.run(f, world, *args)      f(rank, world, *args) on the first `world` processes; their results, by rank

`f` is a function at the top of a module. Each call has a torch.distributed of its own, `world` processes large, and
one thread and warnings as errors in each process. The fixture `pool` has four; `outcomes` gives exceptions, too.
"""

import faulthandler
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import _SERVER
from tests.patience import PATIENCE_S

_MORE_PATIENT = timedelta(seconds=2 * PATIENCE_S)
"""So that no wait in vain ends by itself before the tests take notice of it."""


class DiedError(RuntimeError):
    """A process ended in a call; with its exit code and, where a signal ended it, the stacks of its threads."""


class Pool:
    """`size` processes, started with the first call and again after one that died or hung."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._members: list[tuple[Any, Connection]] = []
        self._num_calls = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
        """The results of `function(rank, world, *args)`, by rank. Raises the exception of the first that raised."""
        found = self.outcomes(function, world, *args, timeout_s=timeout_s)
        for rank, outcome in enumerate(found):
            if isinstance(outcome, BaseException):
                outcome.add_note(f"in process {rank} of {world}, others: {[str(other)[:300] for other in found]}")
                raise outcome
        return found

    def outcomes(
        self, function: Callable[..., Any], world: int, *args: Any, timeout_s: float = PATIENCE_S
    ) -> list[Any]:
        """As `run`, with the exception (its traceback in its notes) where a process raised one.

        Kills the pool and raises AssertionError, with the stacks of all, after `timeout_s`.
        """
        if not self._members:
            self._start()
        self._num_calls += 1
        members = self._members[:world]
        assert len(members) == world, f"the pool has {self.size} processes"
        for _, connection in members:
            connection.send_bytes(pickle.dumps((self._num_calls, function, world, args)))
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        rest = {connection: rank for rank, (_, connection) in enumerate(members)}
        while rest:
            ready = wait(list(rest), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(sorted(rest.values()))
                self.close()
                raise AssertionError(
                    f"the processes {sorted(rest.values())} did not end in {timeout_s} s\n{stacks}"
                )
            for connection in ready:
                rank = rest.pop(connection)
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    outcomes[rank] = self._died(rank)
        if any(isinstance(outcome, DiedError) for outcome in outcomes.values()):
            self.close()
        return [outcomes[rank] for rank in range(world)]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        if self._members:
            self._folder.cleanup()
        self._members = []

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = _SERVER.Pipe()
            stacks = Path(self._folder.name, f"{rank}.stacks")
            process = _SERVER.Process(target=_work, args=(rank, self._store.port, theirs, stacks), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _died(self, rank: int) -> "DiedError":
        process, _ = self._members[rank]
        process.join()
        stack = Path(self._folder.name, f"{rank}.stacks").read_text()
        return DiedError(f"the process died with exit code {process.exitcode}\n{stack}")

    def _stacks(self, ranks: list[int]) -> str:
        """What the processes `ranks` are doing."""
        for rank in ranks:
            self._members[rank][0].terminate()
        time.sleep(0.2)  # for the handlers to write; nothing depends on it
        files = [Path(self._folder.name, f"{rank}.stacks") for rank in ranks]
        return "\n".join(f"--- process {file.stem}\n{file.read_text()}" for file in files)


def _work(rank: int, port: int, connection: Connection, stacks: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGTERM, file)
        faulthandler.enable(file)
        while True:
            try:
                number, function, world, args = pickle.loads(connection.recv_bytes())
            except EOFError:  # the tests are over
                return
            if dist.is_initialized():  # all are done with it, as the tests wait for all
                dist.destroy_process_group()
            own = dist.PrefixStore(str(number), store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=_MORE_PATIENT)
            try:
                outcome = function(rank, world, *args)
            except BaseException as error:
                outcome = _sendable(error)
            connection.send_bytes(pickle.dumps(outcome))  # tensors by value


def _sendable(error: BaseException) -> BaseException:
    """`error` without what cannot be sent, and with its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(text)
    return copy
