"""The demonstration as a whole, on real parts."""

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
import torch

from stretto.demo.conditions import conditions
from stretto.demo.interrupts import interrupts_put_off
from stretto.demo.job import Augment, Trainer
from stretto.demo.page import write_page
from stretto.demo.run import Plan, summarise
from tests.forked import python
from tests.patience import PATIENCE_S

SMALL = """
import stretto.demo.run as demo
from stretto.cli.main import app
from stretto.demo.fashion import FashionMNIST

whole = demo.load_fashion_mnist()
part = FashionMNIST(*(array[:6400] for array in (whole.train_images, whole.train_labels)), *(
    array[:1000] for array in (whole.test_images, whole.test_labels)))
demo.load_fashion_mnist = lambda: part
app()
"""
"""The command, on a tenth of Fashion-MNIST: all of it takes seconds to upload."""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A short run of the command itself."""
    folder = tmp_path_factory.mktemp("demo")
    files = ["--json", str(folder / "demo.json"), "--html", str(folder / "demo.html")]
    how = ["--only", "none,batch,before", "--target", "45", "--max-updates", "200", "--ratio", "3"]
    finished = python("-c", SMALL, "demo", *how, *files)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads((folder / "demo.json").read_text())
    return {**found, "output": finished.stdout, "page": (folder / "demo.html").read_text()}


def test_demo_reaches_the_target_in_both_conditions_and_counts_both_clocks(record: dict) -> None:
    plain, _, echoed = record["runs"]
    assert plain["reached"]
    assert echoed["reached"]
    assert plain["fresh_examples"] == plain["updates"] * 128
    for run in record["runs"][1:]:
        assert run["fresh_examples"] % 128 == 0
        assert run["updates"] * 128 / run["fresh_examples"] == pytest.approx(run["factor"])
        assert 1 < run["factor"] <= 3
    assert plain["curve"][-1]["accuracy"] >= 45


def test_demo_sets_the_ratio_within_ten_percent(record: dict) -> None:
    assert record["speeds"]["ratio"] == pytest.approx(3, rel=0.1)


def test_demo_prints_the_table_and_the_verdict(record: dict) -> None:
    assert "no echo" in record["output"]
    assert record["summary"].split(":")[0] in record["output"]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


def test_page_is_self_contained(record: dict) -> None:
    links = _Links()
    links.feed(record["page"])
    assert links.found == []
    assert record["page"].count("<table>") == 1


def test_page_escapes_what_a_record_says(record: dict, tmp_path: Path) -> None:
    rows = [{**row, "title": "<b>x</b>"} for row in record["rows"]]
    write_page({**record, "rows": rows, "summary": "<script>alert(1)</script>"}, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in page
    assert "<td><b>x" not in page


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ctrl_c_ends_every_process_of_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL, "demo", "--html", str(tmp_path / "page.html")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "t_down" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2  # the server and the link
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ratio", "-1"], r"ratio=-1.0: expected at least 0.1"),
        (["--only", "none,befor"], r"unknown conditions \['befor'\]: expected some of"),
        (["--store", "ftp://host/data"], r"s3://BUCKET/PREFIX or http\(s\)://HOST/PATH, found 'ftp://host/data'"),
        (["--store", "http://127.0.0.1:9/data"], r"Could not read index.json of http://127.0.0.1:9/data"),
    ],
)
def test_bad_input_ends_in_one_line(arguments: list[str], expected: str) -> None:
    finished = python("-m", "stretto.cli", "demo", *arguments)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert re.search(expected, " ".join(finished.stderr.split()))


def test_summary_says_that_echoing_cannot_help_at_r_near_one() -> None:
    rows = [{"condition": "none", "title": "no echo", "speedup": 1.0, "au_percent": 85.0}]
    assert "no gain" in summarise(1.02, 85, rows)
    assert "no echo: AU 85 %" in summarise(1.02, 85, rows)


def test_summary_names_the_best_condition() -> None:
    rows = [
        {"condition": "none", "title": "no echo", "speedup": 1.0},
        {"condition": "before", "title": "before", "speedup": 4.6},
        {"condition": "auto", "title": "auto", "speedup": 5.04},
    ]
    assert "auto reached 85 % 5.0 times sooner" in summarise(6.0, 85, rows)


def test_conditions_share_one_factor_and_auto_may_exceed_it() -> None:
    none, *echoed, auto = conditions(6.1)
    assert none.factor is None
    assert {condition.factor for condition in echoed} == {6.0}
    assert auto.max_factor == 12


def test_plan_refuses_zero_seeds() -> None:
    with pytest.raises(ValueError, match="seeds=0: expected at least 1"):
        Plan(seeds=0)


def test_augment_moves_and_mirrors_but_keeps_every_pixel_value() -> None:
    images = torch.zeros(64, 1, 28, 28, dtype=torch.uint8)
    images[:, 0, 10:14, 8:20] = torch.arange(1, 49, dtype=torch.uint8).view(4, 12)
    labels = torch.arange(64)
    moved, kept = Augment(seed=0)((images, labels))
    assert torch.equal(kept, labels)
    assert torch.equal(moved.flatten(1).sort().values, images.flatten(1).sort().values)
    assert len({image.numpy().tobytes() for image in moved}) > 20
    again, _ = Augment(seed=0)((images, labels))
    assert torch.equal(again, moved)


def test_trainers_of_one_seed_make_the_same_steps() -> None:
    images = torch.randint(0, 255, (32, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    batch = (images, torch.arange(32) % 10)
    trainers = [Trainer(seed=3), Trainer(seed=3)]
    for trainer in trainers:
        trainer.step(batch)
    first, second = (torch.cat([p.flatten() for p in t.model.parameters()]) for t in trainers)
    assert torch.equal(first, second)


def test_an_interrupt_while_workers_start_is_put_off() -> None:
    began = []

    def start() -> None:
        with interrupts_put_off():
            signal.raise_signal(signal.SIGINT)
            began.append("all of the block runs")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert began
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
