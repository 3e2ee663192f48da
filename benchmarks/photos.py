"""Photographs for the benchmarks: 500x375 JPEG files, cut from the desktop pictures that Debian packages.

Each picture that Pillow opens is cut into tiles that do not overlap, saved at quality 90. Tiles below 12 kB are
left out: they show one colour or a smooth gradient. 2,382 remain, with a median of 23 kB. Most photographs of that
size have more detail and take longer to decode, so that echoing gains no less from them.

What was done is kept in ~/.cache/stretto/photos (or under $XDG_CACHE_HOME), package by package; a run that was
interrupted goes on with the next one.
"""

import io
from pathlib import Path

import numpy as np
from debian import cache_folder, unpacked
from PIL import Image, UnidentifiedImageError

PACKAGES = (
    "gnome-backgrounds",
    "lomiri-wallpapers-20.04",
    "mate-backgrounds",
    "plasma-workspace-wallpapers",
    "ukui-wallpapers",
)
WIDTH, HEIGHT, QUALITY = 500, 375, 90
_LEAST_BYTES = 12_000
_TILES = f"tiles-{WIDTH}x{HEIGHT}"


def photos() -> list[Path]:
    """The tiles, in an order that is always the same; downloads 206 MB and cuts for a minute the first time.

    Raises RuntimeError if they are not there and cannot be made.
    """
    cache = cache_folder("photos")
    for package in PACKAGES:
        if not (cache / _TILES / package).is_dir():
            _make_tiles(package, cache)
    return [tile for package in PACKAGES for tile in sorted((cache / _TILES / package).glob("*.jpg"))]


def photos_made_before() -> list[Path] | None:
    """The tiles if all of them are there already, else None."""
    cache = cache_folder("photos")
    return photos() if all((cache / _TILES / package).is_dir() for package in PACKAGES) else None


def generate(directory: Path, count: int) -> list[Path]:
    """JPEG files of the same size and about as many bytes as the photographs: smooth shapes with some noise."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = smooth + rng.normal(0, 4, smooth.shape).astype(np.float32)
        path = directory / f"generated-{number:04}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        paths.append(path)
    return paths


def _make_tiles(package: str, cache: Path) -> None:
    with unpacked(package, cache / _TILES / package) as found:
        files = [path for path in sorted(found.rglob("*")) if path.is_file() and not path.is_symlink()]
        tiles = found / "tiles"
        tiles.mkdir()
        count = 0
        for path in files:
            for tile in _cut(path):
                (tiles / f"{count:04}.jpg").write_bytes(tile)
                count += 1
        tiles.rename(cache / _TILES / package)


def _cut(path: Path) -> list[bytes]:
    """The JPEG tiles of a picture; none of a file that is no picture."""
    try:
        picture = Image.open(path).convert("RGB")
    except UnidentifiedImageError:
        return []
    tiles = []
    for top in range(0, picture.height - HEIGHT + 1, HEIGHT):
        for left in range(0, picture.width - WIDTH + 1, WIDTH):
            file = io.BytesIO()
            picture.crop((left, top, left + WIDTH, top + HEIGHT)).save(file, "JPEG", quality=QUALITY)
            tiles.append(file.getvalue())
    return [tile for tile in tiles if len(tile) >= _LEAST_BYTES]
