"""Files out of Debian's packages, unpacked without root, and the folder that what is made of them is kept in."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The user's folder for data of that name, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto" / name


@contextmanager
def unpacked(package: str, into: Path) -> Iterator[Path]:
    """Download a package and unpack it into a folder beside `into`, which is removed in the end.

    Raises RuntimeError if it cannot be had: `into` is what the user may copy from another machine instead.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RuntimeError(
                f"{into} is made from Debian's package {package}, but there is no {tool} here: run this on Debian "
                f"or Ubuntu, or copy {into} from there"
            )
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="unfinished-") as temporary:
        folder = Path(temporary)
        print(f"  downloading Debian's package {package}", flush=True)
        _call(["apt-get", "download", package], folder)
        [deb] = folder.glob("*.deb")
        _call(["dpkg-deb", "-x", str(deb), "unpacked"], folder)
        yield folder / "unpacked"


def _call(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        hint = " (does `apt-get update` help?)" if command[0] == "apt-get" else ""
        raise RuntimeError(f"`{' '.join(command)}` failed{hint}: {done.stderr.strip()}")
