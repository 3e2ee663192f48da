"""The command line, one module a verb."""

from stretto.cli.main import main

__all__ = ["main"]
