"""`stretto`: the verbs."""

from importlib.metadata import version
from typing import Annotated

import typer

from stretto.cli.compare import compare_records
from stretto.cli.demo import demo
from stretto.cli.doctor import doctor
from stretto.cli.plan import plan
from stretto.cli.prove import prove
from stretto.cli.run import PASS_ON, run
from stretto.cli.study import study

app = typer.Typer(
    help="stretto keeps accelerators busy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command(context_settings=PASS_ON)(run)
app.command(context_settings=PASS_ON)(prove)
app.command("compare")(compare_records)
app.command()(plan)
app.command()(study)
app.command()(doctor)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"stretto {version('stretto')}")
        raise typer.Exit


@app.callback()
def _verbs(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version, and end.")
    ] = False,
) -> None:
    """stretto keeps accelerators busy."""
