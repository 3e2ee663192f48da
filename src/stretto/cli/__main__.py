"""`python -m stretto.cli`: the same as `stretto`."""

from stretto.cli.main import app

app()
