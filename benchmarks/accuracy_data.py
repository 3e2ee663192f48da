"""The data that `accuracy.py` trains on: Fashion-MNIST, digits of 8x8, and definitions of English words.

Each comes as training and evaluation tensors. What is evaluated on is either the test set or "held out": training
examples that no run trains on, by which each method's learning rate is chosen.
"""

import gzip
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from debian import cache_folder, unpacked

from stretto.demo.fashion import load_fashion_mnist

NUM_FASHION, NUM_FASHION_FULL, NUM_HELD_OUT = 12_000, 50_000, 10_000
TEXT_PACKAGE = "dict-wn"
TEXT_LENGTH = 64
"""Characters of a training example."""
_MEMBER = "usr/share/dictd/wn.dict.dz"
_ALPHABET = "\nabcdefghijklmnopqrstuvwxyz0123456789 ,.;:'\"()-`?!/&%$"
VOCABULARY = len(_ALPHABET) + 1  # and one for every other character
_NUM_TEXT_EVALUATION = 2_000


@dataclass(frozen=True, slots=True)
class Data:
    """Inputs and targets, to train on and to evaluate on."""

    x: torch.Tensor
    y: torch.Tensor
    evaluation_x: torch.Tensor
    evaluation_y: torch.Tensor


@cache
def load(workload: str, split: str) -> Data:
    """The data of a workload; split is "held-out" or "test"."""
    loaders: dict[str, Callable[[str], Data]] = {
        "fashion": partial(_fashion, NUM_FASHION),
        "fashion-full": partial(_fashion, NUM_FASHION_FULL),
        "digits": _digits,
        "text": _text,
        "made-up": _made_up,
    }
    return loaders[workload](split)


def _fashion(count: int, split: str) -> Data:
    """float32 [N, 1, 28, 28] of mean 0, and labels: the first `count`; held out are the last 10,000."""
    data = load_fashion_mnist()
    images = (torch.from_numpy(data.train_images).unsqueeze(1).float() / 255 - 0.286) / 0.353
    labels = torch.from_numpy(data.train_labels.astype(np.int64))
    if split == "held-out":
        return Data(images[:count], labels[:count], images[-NUM_HELD_OUT:], labels[-NUM_HELD_OUT:])
    test = (torch.from_numpy(data.test_images).unsqueeze(1).float() / 255 - 0.286) / 0.353
    return Data(images[:count], labels[:count], test, torch.from_numpy(data.test_labels.astype(np.int64)))


def _digits(split: str) -> Data:
    """float32 [N, 1, 8, 8] and labels of 1,797 digits: 500 for the test, 300 held out of the rest."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (only needed here)

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(found.images).float().unsqueeze(1)[order] - 4.88) / 6.02
    labels = torch.from_numpy(found.target.astype(np.int64))[order]
    if split == "held-out":
        return Data(images[800:], labels[800:], images[500:800], labels[500:800])
    return Data(images[500:], labels[500:], images[:500], labels[:500])


def _text(split: str) -> Data:
    """int64 [N, 64] characters and those that follow each: WordNet's definitions, every one once.

    Definitions go to training, held out or test by a hash of their text, so none is in two of them.
    """
    parts: dict[str, list[str]] = {"train": [], "held-out": [], "test": []}
    for definition in definitions():
        place = hashlib.blake2b(definition.encode(), digest_size=1).digest()[0]
        parts["held-out" if place < 16 else "test" if place < 32 else "train"].append(definition)
    x, y = _examples(parts["train"])
    evaluation_x, evaluation_y = _examples(parts[split])
    return Data(x, y, evaluation_x[:_NUM_TEXT_EVALUATION], evaluation_y[:_NUM_TEXT_EVALUATION])


def _examples(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    codes = {character: code for code, character in enumerate(_ALPHABET)}
    # In the order of their hash: neighbours in the dictionary resemble each other.
    texts = sorted(texts, key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).digest())
    stream = np.array([codes.get(c, len(codes)) for c in "\n".join(texts).lower()], np.int64)
    count = (len(stream) - 1) // TEXT_LENGTH
    x, y = (torch.from_numpy(stream[at : at + count * TEXT_LENGTH]).view(count, TEXT_LENGTH) for at in (0, 1))
    return x, y


def definitions() -> list[str]:
    """The definition of every sense, without cross references, each once (synonyms share theirs)."""
    text = gzip.decompress(_dictionary().read_bytes()).decode("utf-8", "replace")
    found: dict[str, None] = {}
    for entry in re.split(r"\n(?=\S)", text):
        body = " ".join(line.strip() for line in entry.splitlines()[1:])
        for sense in re.split(r"(?:^|\s)(?:n |v |adj |adv )?\d+: ", body)[1:]:
            definition = re.sub(r"\[(?:syn|ant|also):?.*?\]", "", sense).split(";")[0].strip()
            if len(definition) > 20:
                found[definition] = None
    return list(found)


def _dictionary() -> Path:
    """Debian's WordNet, fetched (11 MB) into the user's cache the first time.

    Raises RuntimeError if it cannot be.
    """
    kept = cache_folder("text") / Path(_MEMBER).name
    if not kept.exists():
        with unpacked(TEXT_PACKAGE, kept) as found:
            (found / _MEMBER).rename(kept)
    return kept


def _made_up(_split: str) -> Data:
    """Ten patterns of 8x8 under noise, for --quick."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (600,), generator=generator)
    images = patterns[labels] + 0.7 * torch.randn(600, 1, 8, 8, generator=generator)
    return Data(images[:400], labels[:400], images[400:], labels[400:])
