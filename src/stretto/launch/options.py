"""What `stretto run` was asked for, handed to the script's processes in an environment variable."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from stretto.echo.factor import Factor, check_factor
from stretto.echo.settings import check_int

DIRECTORY = "STRETTO_RUN_DIRECTORY"
_OPTIONS = "STRETTO_RUN_OPTIONS"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Raises TypeError or ValueError for values that cannot work."""

    echo: Factor | None = None
    """The echoing factor of training loaders, "auto", or None for no echo."""
    steps: int | None = None
    """The run ends after so many updates."""
    workers: int | None = None
    """num_workers of the loaders."""
    prefetch: int | None = None
    """prefetch_factor of the loaders."""

    def __post_init__(self) -> None:
        if self.echo is not None:
            object.__setattr__(self, "echo", check_factor(self.echo))
        for name, at_least in (("steps", 2), ("workers", 0), ("prefetch", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=at_least)
        if self.prefetch is not None and self.workers == 0:
            raise ValueError(f"prefetch={self.prefetch} with workers=0: batches are made ahead by workers only")

    def to_json(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)

    def to_environment(self, directory: Path) -> dict[str, str]:
        """The variables that the child reads."""
        return {DIRECTORY: str(directory), _OPTIONS: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> tuple[Path, Self]:
        """In the child: the folder for the records, and the options."""
        return Path(os.environ[DIRECTORY]), cls(**json.loads(os.environ[_OPTIONS]))


def parse_factor(text: str | None) -> Factor | None:
    """What --echo was given. Raises ValueError if it is neither a number >= 1 nor "auto"."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    try:
        return check_factor(float(text))
    except ValueError:
        raise ValueError(f'--echo {text}: expected a number >= 1, the uses of each example, or "auto"') from None
