"""The shard format, and the upload of a data set as shards with an index.

    shard:  magic (8 bytes) | version | count | height | width | CRC-32 of the payload | payload
    payload: count labels (one byte each) | count * height * width pixels (one byte each)

All header numbers are unsigned 32-bit little-endian. A shard of 128 images of 28 x 28 has 100,508 bytes.
`index.json` beside the folder `shards/` lists every shard with its size and its number of examples.
"""

import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stretto.demo.client import brief

if TYPE_CHECKING:
    from obstore.store import ObjectStore

INDEX_NAME = "index.json"
_MAGIC = b"STRTSHRD"
_VERSION = 1
_HEADER = struct.Struct("<8s5I")
_UPLOADS_AT_ONCE = 8

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One line of the index."""

    name: str
    size_bytes: int
    num_examples: int


@dataclass(frozen=True, slots=True)
class Index:
    """What a store holds; `shards` is in the order of upload."""

    examples_per_shard: int
    shards: tuple[ShardEntry, ...]

    @property
    def num_examples(self) -> int:
        """Examples in all shards."""
        return sum(shard.num_examples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)

    def to_json(self) -> bytes:
        """Return the content of `index.json`."""
        return json.dumps({"version": _VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes, name: str = INDEX_NAME) -> "Index":
        """Read the content of `index.json`.

        Raises:
            ValueError: it is no index, or one of another version.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            version = fields["version"]
            if version != _VERSION:
                raise ValueError(f"version {version!r}, expected {_VERSION}")
            shards = tuple(
                ShardEntry(str(shard["name"]), int(shard["size_bytes"]), int(shard["num_examples"]))
                for shard in fields["shards"]
            )
            return cls(int(fields["examples_per_shard"]), shards)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{name} ({len(data):,} bytes) is no index of stretto's shards: {type(error).__name__}: {error}. "
                "Upload the data set again with stretto.demo.shards.upload."
            ) from error


def encode(images: UInt8Array, labels: npt.NDArray[np.integer[Any]]) -> bytes:
    """Return the shard of these examples.

    Args:
        images: uint8 [N, H, W].
        labels: integers [N] from 0 to 255.

    Raises:
        ValueError: other types, shapes or values.
    """
    if images.dtype != np.uint8 or images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"A shard takes images uint8 [N, H, W] and labels [N], found {images.dtype} {list(images.shape)} and "
            f"{labels.dtype} {list(labels.shape)}; convert them first."
        )
    if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) <= 255:
        raise ValueError(
            f"A shard keeps a label in one byte, found {labels.min()} to {labels.max()}; map them to 0-255."
        )
    payload = labels.astype(np.uint8).tobytes() + images.tobytes()
    return _HEADER.pack(_MAGIC, _VERSION, *images.shape, zlib.crc32(payload)) + payload


def decode(data: bytes, name: str) -> tuple[UInt8Array, UInt8Array]:
    """Return (images uint8 [N, H, W], labels uint8 [N]) of a shard, both writable.

    Raises:
        ValueError: the bytes are not a whole, intact shard; the message has `name`.
    """
    advice = f"Read {name} again; if it stays so, upload the data set again."
    if len(data) < _HEADER.size:
        raise ValueError(f"Shard {name} is truncated: {len(data)} bytes, expected {_HEADER.size} or more. {advice}")
    magic, version, count, height, width, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(
            f"{name} is no shard of this version: {len(data):,} bytes that begin with {data[:12]!r}, "
            f"expected {_MAGIC + struct.pack('<I', _VERSION)!r}. {advice}"
        )
    expected_bytes = _HEADER.size + count * (1 + height * width)
    if len(data) != expected_bytes:
        kind = "truncated" if len(data) < expected_bytes else "too long"
        raise ValueError(f"Shard {name} is {kind}: {len(data):,} bytes, expected {expected_bytes:,}. {advice}")
    payload = memoryview(data)[_HEADER.size :]
    found = zlib.crc32(payload)
    if found != crc:
        raise ValueError(
            f"Shard {name} is corrupt: its {len(data):,} bytes (expected {expected_bytes:,}) have the CRC-32 "
            f"{found:08x}, expected {crc:08x}. {advice}"
        )
    labels = np.frombuffer(payload[:count], np.uint8).copy()
    images = np.frombuffer(payload[count:], np.uint8).reshape(count, height, width).copy()
    return images, labels


def upload(
    store: "ObjectStore",
    images: UInt8Array,
    labels: npt.NDArray[np.integer[Any]],
    *,
    examples_per_shard: int = 128,
    seed: int = 0,
) -> Index:
    """Shuffle the examples once, write them as `shards/00000.shard`..., then `index.json`, and return the index.

    Args:
        store: as `open_store` gives it.
        images: uint8 [N, H, W].
        labels: integers [N] from 0 to 255.
        examples_per_shard: of all shards but the last. One training batch or less makes the reading smoothest.
        seed: of the shuffle.

    Raises:
        ValueError: `encode` refuses the examples, there are none, or `examples_per_shard` is below 1.
        RuntimeError: the store refuses an upload.
    """
    import obstore  # noqa: PLC0415  (an optional dependency)
    from obstore import exceptions  # noqa: PLC0415

    if examples_per_shard < 1 or len(images) < 1:
        raise ValueError(
            f"upload needs examples_per_shard of 1 or more and at least one image, found {examples_per_shard!r} "
            f"and {len(images)} images; 128 a shard is usual."
        )
    order = np.random.default_rng(seed).permutation(len(images))

    def write(name: str, data: bytes) -> None:
        try:
            obstore.put(store, name, data)
        except (exceptions.BaseError, OSError) as error:
            raise RuntimeError(
                f"Could not write {name} to the store: {brief(error)}. Check that it is up, that the bucket "
                "exists, and the keys."
            ) from error

    def put(number: int) -> ShardEntry:
        chosen = order[number * examples_per_shard : (number + 1) * examples_per_shard]
        data = encode(images[chosen], labels[chosen])
        entry = ShardEntry(f"shards/{number:05d}.shard", len(data), len(chosen))
        write(entry.name, data)
        return entry

    num_shards = -(-len(images) // examples_per_shard)
    with ThreadPoolExecutor(_UPLOADS_AT_ONCE) as pool:
        index = Index(examples_per_shard, tuple(pool.map(put, range(num_shards))))
    # Last, so that whoever finds an index finds all its shards.
    write(INDEX_NAME, index.to_json())
    return index
