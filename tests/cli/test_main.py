"""What `stretto` says without a verb."""

from importlib.metadata import version

from tests.forked import python


def test_the_version_is_that_of_the_installed_package() -> None:
    assert python("-m", "stretto.cli", "--version").stdout == f"stretto {version('stretto')}\n"
