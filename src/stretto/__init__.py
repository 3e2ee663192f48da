"""stretto keeps accelerators busy: data echoing for training runs that wait for their input pipeline."""

from stretto.echo.dataloader import EchoDataLoader, echo_plan
from stretto.echo.loader import EchoLoader, echo
from stretto.echo.stages import StagedDataset
from stretto.echo.stats import EchoStats
from stretto.echo.workers.batch_plan import EchoPlan

__all__ = ["EchoDataLoader", "EchoLoader", "EchoPlan", "EchoStats", "StagedDataset", "echo", "echo_plan"]
