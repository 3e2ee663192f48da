"""Photographs cut to small JPEG tiles, from the desktop pictures that Debian packages."""

import io
from functools import cache
from pathlib import Path

import numpy as np
from debian import cache_folder, unpacked
from PIL import Image

PHOTOGRAPHS = {
    "mate-backgrounds": (
        *("Aqua", "Blinds", "Dune", "FreshFlower", "Garden", "GreenMeadow", "LadyBird", "RainDrops", "Storm"),
        *("TwoWings", "Wood", "YellowFlower"),
    ),
    "plasma-workspace-wallpapers": (
        *("BytheWater", "ColdRipple", "ColorfulCups", "EveningGlow", "FallenLeaf", "Grey", "Kite", "OneStandsOut"),
        "Path",
    ),
}
"""By package: the JPEG files that are photographs; the other files are drawings, or smaller versions."""
NAMES = tuple(name for names in PHOTOGRAPHS.values() for name in names)
SIDE = 72
_WIDTH = 1920
_QUALITY = 90


@cache
def load_tiles() -> dict[str, list[bytes]]:
    """JPEG tiles of 72x72 for each photograph, row by row; 141 MB are fetched the first time.

    A photograph is made 1920 pixels wide unless it is smaller, and cut into tiles that do not overlap.

    Raises RuntimeError if they are not in the cache and cannot be made.
    """
    folder = cache_folder("tiles")
    for package, names in PHOTOGRAPHS.items():
        kept = folder / f"{package}-{SIDE}.npz"
        if not kept.exists():
            with unpacked(package, kept) as found:
                finished = found / kept.name
                np.savez(finished, **{name: _pack(_cut(_find(found, name))) for name in names})
                finished.rename(kept)
    tiles = {}
    for package in PHOTOGRAPHS:
        with np.load(folder / f"{package}-{SIDE}.npz") as packed:
            tiles |= {name: _unpack(packed[name]) for name in packed.files}
    return tiles


def decode(content: bytes) -> np.ndarray:
    """A JPEG file to uint8 [3, height, width]."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)


def _find(folder: Path, name: str) -> Path:
    """The largest picture of that name; in Plasma's packages the name is a folder's."""
    pictures = [path for path in folder.rglob("*.jpg") if not path.is_symlink() and path.stem != "screenshot"]
    named = [path for path in pictures if name in (path.stem, *path.parts)]
    return max(named, key=lambda path: path.stat().st_size)


def _cut(path: Path) -> list[bytes]:
    picture = Image.open(path).convert("RGB")
    picture.thumbnail((_WIDTH, _WIDTH))
    tiles = []
    for top in range(0, picture.height - SIDE + 1, SIDE):
        for left in range(0, picture.width - SIDE + 1, SIDE):
            file = io.BytesIO()
            picture.crop((left, top, left + SIDE, top + SIDE)).save(file, "JPEG", quality=_QUALITY)
            tiles.append(file.getvalue())
    return tiles


def _pack(files: list[bytes]) -> np.ndarray:
    """Each file's length as four bytes, and the file."""
    return np.frombuffer(b"".join(len(file).to_bytes(4, "big") + file for file in files), np.uint8)


def _unpack(packed: np.ndarray) -> list[bytes]:
    content, files, at = packed.tobytes(), [], 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        files.append(content[at + 4 : at + 4 + length])
        at += 4 + length
    return files
