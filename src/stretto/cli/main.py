"""`stretto`: the verbs."""

import sys

import typer

from stretto.cli.demo import demo

app = typer.Typer(
    help="stretto keeps accelerators busy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)


@app.callback()
def _verbs() -> None:
    """stretto keeps accelerators busy."""


def main() -> None:
    """Run the command line. Errors that a user can mend end in one line and exit code 1, Ctrl-C in 130."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
