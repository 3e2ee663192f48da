"""Two English texts in pieces of which no two are alike, as rows of bytes to train and to test on."""

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from accuracy_data import definitions
from debian import cache_folder, unpacked
from torch import Tensor

LINUX_PACKAGE = "linux-doc-6.1"
_TEST_SHARE = 1 / 16
_OPENING = 40


@dataclass(frozen=True, slots=True)
class Text:
    """uint8 [N, T + 1]: T bytes, each with the one that follows it."""

    train: Tensor
    test: Tensor


def split(pieces: list[str], length: int, num_test: int) -> Text:
    """Pieces to train on, and the first `num_test` rows of those to test on, a sixteenth of them.

    A hash of a piece's first 40 letters decides, so that pieces which begin alike, and may be variants of each
    other, are on the same side. Each side is in the order of its hashes: neighbours in the source resemble each
    other.
    """
    sides: dict[bool, list[tuple[bytes, str]]] = {False: [], True: []}
    for piece in pieces:
        opening = hashlib.blake2b(_letters(piece)[:_OPENING].encode(), digest_size=8).digest()
        is_test = int.from_bytes(opening, "big") < _TEST_SHARE * 2**64
        sides[is_test].append((hashlib.blake2b(piece.encode(), digest_size=8).digest(), piece))
    train, test = (_rows([piece for _, piece in sorted(sides[is_test])], length) for is_test in (False, True))
    return Text(train, test[:num_test])


def distinct(pieces: list[str]) -> list[str]:
    """The pieces, without those whose letters are the same as an earlier one's."""
    return list({_letters(piece): piece for piece in reversed(pieces)}.values())[::-1]


def _letters(piece: str) -> str:
    return re.sub("[^a-z]+", " ", piece.lower()).strip()


def _rows(pieces: list[str], length: int) -> Tensor:
    stream = torch.from_numpy(np.frombuffer("\n".join(pieces).encode("ascii", "replace"), np.uint8).copy())
    return stream[: len(stream) // (length + 1) * (length + 1)].view(-1, length + 1)


@cache
def wordnet() -> list[str]:
    """WordNet's definitions, 5 MB; 11 MB are fetched the first time."""
    return distinct(definitions())


@cache
def linux_documentation() -> list[str]:
    """Paragraphs of prose from Linux's documentation, 9 MB; 37 MB are fetched the first time.

    Raises RuntimeError if they cannot be fetched. A package's security update changes a few paragraphs.
    """
    kept = cache_folder("text") / "linux-doc.txt.gz"
    if not kept.exists():
        with unpacked(LINUX_PACKAGE, kept) as found:
            pages = [path for path in sorted(found.rglob("Documentation/**/*.rst.gz")) if not path.is_symlink()]
            paragraphs = [
                paragraph
                for path in pages
                if "translations" not in path.parts
                for paragraph in _prose(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
            ]
            finished = found / kept.name
            finished.write_bytes(gzip.compress("\n".join(distinct(paragraphs)).encode()))
            finished.rename(kept)
    return gzip.decompress(kept.read_bytes()).decode().split("\n")


def _prose(page: str) -> list[str]:
    """The paragraphs that read like sentences, each on one line."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", page)]
    return [text for text in paragraphs if len(text) >= 80 and text[0].isupper() and _is_mostly_letters(text)]


def _is_mostly_letters(text: str) -> bool:
    return text[-1] in ".:" and sum(c.isalpha() or c == " " for c in text) >= 0.88 * len(text)
