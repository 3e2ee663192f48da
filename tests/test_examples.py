"""Every example trains on small data of its kind and prints what happened."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.forked import python

ROOT = Path(__file__).parents[1]
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TWO_RANKS = (*RANKS, "examples/two_ranks.py")
SPLIT = (*RANKS, "examples/split.py")


def run(*arguments: object) -> str:
    variables = {"OMP_NUM_THREADS": "1", "NO_ALBUMENTATIONS_UPDATE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = python(*arguments, cwd=ROOT, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str, of: str = "loss") -> list[float]:
    return [float(number) for number in re.findall(rf"{of} (\d+\.\d+)", output)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """12 JPEG files of each of two classes, dark and light, and one that is broken."""
    rng = np.random.default_rng(0)
    for name, light in (("dark", 0), ("light", 150)):
        (tmp_path / name).mkdir()
        for number in range(12):
            pixels = rng.integers(light, light + 100, (90, 120, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.jpg")
    (tmp_path / "dark" / "broken.jpeg").write_bytes(b"no image")
    return tmp_path


def test_images_are_decoded_once_an_epoch_and_the_loss_falls(photos: Path) -> None:
    arguments = ("--data", photos, "--factor", 3, "--workers", 1, "--batch-size", 4, "--lr", 0.01)
    output = run("examples/images.py", *arguments, "--compare")
    assert "factor 3.0: 72 examples read, 3 skipped, 216 used in 54 updates" in output
    assert re.search(r"factor 1.0: \d+ examples read, \d+ skipped, 2\d\d used in 54 updates", output)
    assert re.search(r"AU \d+ %", output)
    with_echo = losses(output.partition("AU")[0])
    assert len(with_echo) == 3
    assert with_echo[-1] < with_echo[0]


def test_a_plain_script_is_echoed_from_outside_at_its_own_number_of_updates(photos: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    script = ("examples/plain.py", "--data", photos, "--batch-size", 2, "--workers", 1, "--epochs", 3)
    output = run("-m", "stretto.cli", "run", "--echo", 2, "--json", record, "--", sys.executable, *script)
    assert len(losses(output)) == len(losses(output, "accuracy")) == 3
    (rank,) = json.loads(record.read_text())["ranks"]
    train, test = sorted(rank["loaders"], key=lambda loader: not loader["is_training"])
    assert rank["updates"] == rank["optimizer_steps"] == train["batches"] == 3 * 10  # of 21 files
    assert train["echo"]["fresh_items"] < train["echo"]["uses"]
    assert test["echo"] is None
    names = [stage["name"] for stage in train["stages"]]
    assert names == ["read", "RandomResizedCrop", "HorizontalFlip", "Normalize", "collate"]


def test_text_says_what_it_expects(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is no file: expected a text file"):
        run("examples/text.py", "--data", tmp_path / "absent.txt")


def test_text_model_learns_and_uses_each_window_as_often_as_asked(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes((ROOT / "LICENSE").read_bytes() + (ROOT / "README.md").read_bytes())
    size = ("--window", 32, "--batch-size", 8)
    output = run("examples/text.py", "--data", text, "--steps", 100, "--factor", 4, *size)
    assert losses(output)[-1] < losses(output)[0] - 1
    assert losses(output, "held out")[-1] < losses(output, "held out")[0] - 1
    num_windows, factor = re.search(
        r"(\d+) windows, each used (\d+\.\d+) times so far, in 100 updates", output
    ).groups()
    assert int(num_windows) * float(factor) == pytest.approx(800, rel=0.01)
    assert float(factor) > 2


def test_two_ranks_make_equal_updates_and_continue_exactly(tmp_path: Path) -> None:
    inputs = torch.randn(101, 8, generator=torch.Generator().manual_seed(0))
    data, saved = tmp_path / "tensors.pt", tmp_path / "saved"
    torch.save({"inputs": inputs, "labels": (inputs[:, 0] > 0).long()}, data)
    arguments = (*TWO_RANKS, "--data", data, "--batch-size", 8, "--steps", 40)
    whole = run(*arguments, "--save", saved, "--save-every", 20)  # an epoch: 51 examples a rank, each used twice
    rest = run(*arguments, "--resume", saved / "20.pt")
    assert losses(whole)[-1] < losses(whole)[0]
    assert losses(rest) == losses(whole)[-1:]
    counts = [re.findall(r"rank \d: (\d+) updates, (\d+) fresh examples", output) for output in (whole, rest)]
    assert counts[0] == counts[1]
    assert [updates for updates, _ in counts[0]] == ["40", "40"]


def test_a_split_model_learns_continues_exactly_and_is_merged(tmp_path: Path) -> None:
    images = torch.randn(240, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = (images[:, :, :4].mean((1, 2, 3)) > images[:, :, 4:].mean((1, 2, 3))).long()
    data, saved = tmp_path / "tensors.pt", tmp_path / "saved"
    torch.save({"images": images, "labels": labels}, data)
    arguments = (*SPLIT, "--data", data, "--batch-size", 25)
    whole = run(*arguments, "--epochs", 4)
    run(*arguments, "--epochs", 4, "--stop-after", 2, "--save", saved)
    rest = run(*arguments, "--epochs", 4, "--resume", saved)
    assert "2 blocks, DSP(0,0; 1,0)" in whole
    assert losses(whole)[-1] < losses(whole)[0]
    assert losses(rest) == losses(whole)[2:]
    assert whole.splitlines()[-1] == rest.splitlines()[-1]
    assert whole.splitlines()[-1].startswith("merged after 32 updates: held out ")
