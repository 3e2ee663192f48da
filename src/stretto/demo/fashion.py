"""Fashion-MNIST (60,000 + 10,000 grey 28x28 images, 10 classes), found on this machine or fetched once.

Looked for in $STRETTO_FASHION_MNIST (alone, if set), in Debian's data set package, then in the user's cache. Else
it is fetched: as that Debian package, unpacked without root, or by its public download. The decompressed content is
checked against a SHA-256 every time, since Debian's files are the originals without the name in the gzip header.
https://github.com/zalandoresearch/fashion-mnist (MIT)
"""

import gzip
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_LOG = logging.getLogger(__name__)
_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_DEBIAN_PACKAGE = "dataset-fashion-mnist"
_PUBLIC = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 300.0
_CONTENT_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FashionMNIST:
    """The data set as arrays."""

    train_images: UInt8Array
    """uint8 [60000, 28, 28]"""
    train_labels: UInt8Array
    """uint8 [60000], 0 to 9"""
    test_images: UInt8Array
    """uint8 [10000, 28, 28]"""
    test_labels: UInt8Array
    """uint8 [10000], 0 to 9"""


def load_fashion_mnist() -> FashionMNIST:
    """Return Fashion-MNIST, fetching it (31 MB) into the user's cache if it is nowhere on this machine.

    Raises:
        ValueError: a file that was found has other content than the published one.
        FileNotFoundError: $STRETTO_FASHION_MNIST is set and does not hold the four files.
        RuntimeError: the data set could not be fetched; the message has the cause of each way.
    """
    chosen = os.environ.get("STRETTO_FASHION_MNIST")
    if chosen:
        missing = _missing(Path(chosen))
        if missing:
            raise FileNotFoundError(
                f"STRETTO_FASHION_MNIST is {chosen!r}, which has no {', '.join(missing)}. Put the four files of "
                "Fashion-MNIST there, or unset the variable and they are fetched."
            )
        return _load(Path(chosen))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto" / "fashion-mnist"
    for folder in (_DEBIAN_FOLDER, cache):
        if not _missing(folder):
            return _load(folder)
    _fetch(cache)
    return _load(cache)


def _missing(folder: Path) -> list[str]:
    return [f"{name}.gz" for name in _CONTENT_SHA256 if not (folder / f"{name}.gz").is_file()]


def _load(folder: Path) -> FashionMNIST:
    arrays = [_parse(_content(folder / f"{name}.gz", name)) for name in _CONTENT_SHA256]
    return FashionMNIST(*arrays)


def _content(path: Path, name: str) -> bytes:
    """Return the decompressed content of a file, checked."""
    packed = path.read_bytes()
    try:
        content = gzip.decompress(packed)
        found = hashlib.sha256(content).hexdigest()
    except (OSError, EOFError, zlib.error) as error:
        found = f"none ({type(error).__name__}: {error})"
    if found != _CONTENT_SHA256[name]:
        raise ValueError(
            f"{path} ({len(packed):,} bytes) is not the published file of Fashion-MNIST: the SHA-256 of its "
            f"content is {found}, expected {_CONTENT_SHA256[name]}. Remove it and it is fetched again."
        )
    return content


def _parse(content: bytes) -> UInt8Array:
    """Read an IDX file of bytes: two zeros, type, number of dimensions, each dimension, then the data."""
    num_dimensions = content[3]
    header = np.frombuffer(content, ">u4", count=num_dimensions, offset=4)
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions)
    return data.reshape([int(size) for size in header]).copy()


def _fetch(cache: Path) -> None:
    ways: list[tuple[str, Callable[[Path], Path]]] = [("public download", _download)]
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        ways.insert(0, (f"Debian package {_DEBIAN_PACKAGE}", _unpack_debian))
    failures = []
    for way, get in ways:
        _LOG.info("Fetching Fashion-MNIST (31 MB) by the %s into %s.", way, cache)
        try:
            with tempfile.TemporaryDirectory(prefix="stretto-fashion-") as scratch:
                folder = get(Path(scratch))
                for name in _CONTENT_SHA256:
                    _content(folder / f"{name}.gz", name)
                _keep(folder, cache)
            return
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or ""
            failures.append(f"{way}: {error} {output.strip()}".strip())
    raise RuntimeError(
        "Fashion-MNIST could not be fetched. "
        + "; ".join(failures)
        + f". Put {', '.join(f'{name}.gz' for name in _CONTENT_SHA256)} into a folder and set "
        "STRETTO_FASHION_MNIST to it."
    )


def _keep(folder: Path, cache: Path) -> None:
    """Copy the four files into the cache, each at once, so that no reader ever sees half a file."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in _CONTENT_SHA256:
        handle, temporary = tempfile.mkstemp(dir=cache, prefix=f".{name}.")
        try:
            with open(handle, "wb") as target:
                target.write((folder / f"{name}.gz").read_bytes())
            os.replace(temporary, cache / f"{name}.gz")
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _unpack_debian(scratch: Path) -> Path:
    def run(*command: str) -> None:
        subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)

    try:
        run("apt-get", "download", _DEBIAN_PACKAGE)
    except subprocess.CalledProcessError:
        if os.geteuid() != 0:
            raise
        # A fresh container has no package lists.
        run("apt-get", "update")
        run("apt-get", "download", _DEBIAN_PACKAGE)
    (package,) = scratch.glob("*.deb")
    run("dpkg-deb", "-x", package.name, "unpacked")
    return scratch / "unpacked" / _DEBIAN_FOLDER.relative_to("/")


def _download(scratch: Path) -> Path:
    for name in _CONTENT_SHA256:
        with urllib.request.urlopen(f"{_PUBLIC}{name}.gz", timeout=_TIMEOUT_S) as response:
            (scratch / f"{name}.gz").write_bytes(response.read())
    return scratch
