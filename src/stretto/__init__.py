"""stretto keeps accelerators busy: it finds what a training run waits for, and fills the wait by data echoing."""

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
