"""stretto keeps accelerators busy: data echoing for training runs that wait for their input pipeline."""

from stretto.echo.loader import EchoLoader, echo
from stretto.echo.stages import StagedDataset
from stretto.echo.stats import EchoStats

__all__ = ["EchoLoader", "EchoStats", "StagedDataset", "echo"]
