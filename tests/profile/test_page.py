"""The page of a run, parsed and drawn by a browser."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stretto.profile.html.page import write_page
from stretto.profile.schema import RunRecord
from tests.patience import PATIENCE_S
from tests.profile import records

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
NAME = "<img src=x onerror=alert(1)> <b>x</b>"


class Parsed(HTMLParser):
    """The tags of a page with their attributes, its headings, and its text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self._inside = ""
        self.feed(page)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in {"script", "style"}:
            self.texts.append(data)
        if self._inside in {"h1", "h2"} and data.strip():
            self.headings.append(data)


def page_of(record: RunRecord, folder: Path) -> str:
    write_page(record, folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def test_verdict_comes_first_then_evidence_then_the_next_step(tmp_path: Path) -> None:
    record = records.straggling()
    page = Parsed(page_of(record, tmp_path))
    order = [record["verdict"], record["straggler"], *record["evidence"], record["next_step"]]
    places = [page.text.index(text or "") for text in order]
    assert places == sorted(places)
    assert page.headings == [
        "What this run waits for",
        "Evidence",
        "Next step",
        "Where the time went",
        "Timeline",
        "Utilisation of every rank",
        "Factor and stall over time",
        "Making examples",
        "R at every insertion point",
        "What each advice would give",
        "Advice",
        "Also found",
        "Loaders",
        "Batches of the training loaders",
        "Ranks",
        "The run",
    ]


@pytest.mark.parametrize("make", [records.unrecognised, records.killed])
def test_what_was_not_measured_is_left_out(make: type, tmp_path: Path) -> None:
    record = make()
    page = Parsed(page_of(record, tmp_path))
    assert record["verdict"] in page.text
    assert not {"Timeline", "Where the time went", "Advice", "R at every insertion point"} & set(page.headings)
    assert "None" not in page.text
    assert "nan" not in page.text.split()


def test_how_the_command_ended_is_said(tmp_path: Path) -> None:
    text = Parsed(page_of(records.killed(), tmp_path)).text
    assert "The command was ended by SIGKILL after 812 ms" in text
    assert "Rank 0: killed by SIGKILL." in text


def test_ranks_have_their_parts_in_percent(tmp_path: Path) -> None:
    text = Parsed(page_of(records.straggling(), tmp_path)).text
    parts = "Rank 1 71.5 s, 1,000 updates on cpu, trainer-2 update 28.0 % waiting 64.3 % first batches 2.80 %"
    assert f"{parts} transfer 0.699 % other 4.20 %" in text


def test_worth_is_said_to_be_measured_on_what_it_was_measured_on(tmp_path: Path) -> None:
    page = page_of(records.starved(), tmp_path)
    assert "at the worth measured on Fashion-MNIST" in page
    assert "speed-up, measured on Fashion-MNIST" in Parsed(page).text


def test_page_needs_no_network(tmp_path: Path) -> None:
    page = Parsed(page_of(records.straggling(), tmp_path))
    links = [value for _, found in page.tags for name, value in found.items() if name in {"src", "href", "srcset"}]
    assert links == []
    policies = [found["content"] for _, found in page.tags if found.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"]


def test_names_of_the_script_stay_text(tmp_path: Path) -> None:
    raw = page_of(records.with_names(NAME), tmp_path)
    page = Parsed(raw)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert NAME not in raw
    assert page.text.count(NAME) > 20


def test_a_path_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    assert r"caf\udce9" in page_of(records.with_names("caf\udce9"), tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_draws_every_plot_and_runs_nothing_of_the_script(tmp_path: Path) -> None:
    write_page(records.with_names(NAME), tmp_path / "page.html")
    assert BROWSER is not None
    command = [
        BROWSER,
        *QUIET,
        f"--user-data-dir={tmp_path / 'browser'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    command.append((tmp_path / "page.html").as_uri())
    finished = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    page = Parsed(finished.stdout)
    plots = [found for tag, found in page.tags if "js-plotly-plot" in (found.get("class") or "")]
    drawn = [tag for tag, found in page.tags if tag == "svg" and found.get("class") == "main-svg"]
    assert len(plots) == 5
    assert len(drawn) >= len(plots)
    # Five bars are labelled with the name: in the drawing, beyond what the page's own text says.
    assert (
        page.text.count(NAME) == Parsed((tmp_path / "page.html").read_text(encoding="utf-8")).text.count(NAME) + 5
    )
    assert not [tag for tag, _ in page.tags if tag in {"img", "image", "b"}]
