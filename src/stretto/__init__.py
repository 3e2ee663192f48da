"""stretto keeps accelerators busy: it finds what a training run waits for, and fills the wait.

By data echoing where it waits for its data, by layer-wise staleness (`stretto.pipelining`) where the blocks of a
split model wait for each other.
"""

import importlib
from types import ModuleType

from stretto.echo.dataloader import EchoDataLoader, echo_plan
from stretto.echo.loader import EchoLoader, echo
from stretto.echo.stages import StagedDataset
from stretto.echo.stats import EchoStats
from stretto.echo.workers.batch_plan import EchoPlan
from stretto.profile.profiler import Profile, profile

__all__ = [
    "EchoDataLoader",
    "EchoLoader",
    "EchoPlan",
    "EchoStats",
    "Profile",
    "StagedDataset",
    "echo",
    "echo_plan",
    "profile",
]


def __getattr__(name: str) -> ModuleType:
    if name == "pipelining":  # imported when it is used: it takes as long as all the rest
        return importlib.import_module("stretto.pipelining")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
