"""The picture of a schedule, as text and as SVG."""

import io
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stretto.pipelining.drawing import schedule_svg, schedule_text
from stretto.pipelining.events import BlockTimes, play, recomputes
from stretto.pipelining.spec import Staleness

SVG = "{http://www.w3.org/2000/svg}"


def lines(text: object) -> list[str]:
    return [line.rstrip() for line in text.plain.splitlines()]


def test_two_devices_as_text() -> None:
    assert lines(schedule_text(Staleness.of(2), num_batches=3)) == [
        "              |warm-up    |steady  |drain",
        "device 0, m=1 F0-F1-R0-...B0----F2-R1-B1----R2-B2----",
        "device 1, m=0 ...F0-B0----F1-B1----F2-B2----.........",
        " F  forward   R  recompute   B  backward  . idle",
    ]


def test_stashed_weights_and_backpropagation_have_no_recompute() -> None:
    assert lines(schedule_text(Staleness.delayed_gradients(2), num_batches=2)) == [
        "              |warm-up    |drain",
        "device 0, m=1 F0-F1-......B0----...B1----",
        "device 1, m=0 ...F0-B0----F1-B1----......",
        " F  forward   B  backward  . idle",
    ]
    assert lines(schedule_text(Staleness.backprop(2), num_batches=1))[1:3] == [
        "device 0, m=0 F0-.........B0----",
        "device 1, m=0 ...F0-B0----......",
    ]


def test_a_slow_link_shows_as_idle_time() -> None:
    shown = lines(schedule_text(Staleness.of(2), hop_s=1.0, num_batches=2))
    assert shown[2] == "device 1, m=0 ......F0-B0----F1-B1----........."


def test_long_rows_go_on_below_and_lose_nothing() -> None:
    wide, narrow = (lines(schedule_text(Staleness.dsp(3), width=width)) for width in (400, 60))
    assert max(map(len, narrow)) <= 60
    for device in range(3):
        begin = f"device {device}, m={Staleness.dsp(3).m[device]} "
        rows = [
            "".join(line.removeprefix(begin) for line in page if line.startswith(begin)) for page in (wide, narrow)
        ]
        assert rows[0] == rows[1]


def test_very_uneven_blocks_still_fit_a_few_rows() -> None:
    shown = lines(schedule_text(Staleness.of(2), BlockTimes((1e-6, 1), (2e-6, 2)), width=60))
    assert len(shown) == 4 * 3 + 1


def test_colours_are_added_for_a_terminal_only() -> None:
    text = schedule_text(Staleness.of(2))
    shown = io.StringIO()
    Console(force_terminal=True, color_system="truecolor", width=200, file=shown).print(text)
    assert "48;2;47;108;191" in shown.getvalue()
    assert "\x1b" not in text.plain


@pytest.mark.parametrize(
    "spec", [Staleness.of(4), Staleness.dsp(3), Staleness.delayed_gradients(2), Staleness.of(1)]
)
def test_the_svg_has_a_cell_for_every_operation_where_the_events_have_it(spec: Staleness) -> None:
    times = BlockTimes.even(spec.K)
    played = play(spec, times, num_batches=5)
    root = ElementTree.fromstring(schedule_svg(spec, times, num_batches=5))
    cells = [group for group in root.iter(f"{SVG}g") if group.get("class", "").startswith("cell")]
    titles = [cell.find(f"{SVG}title").text for cell in cells]
    assert titles == [f"device {one.block}: {one.kind} of batch {one.batch}" for one in played.operations]
    starts = [float(cell.find(f"{SVG}rect").get("x")) for cell in cells]
    scale = (1000 - 128 - 8) / played.end_s
    assert starts == pytest.approx([128.5 + one.start_s * scale for one in played.operations], abs=0.1)
    numbers = [cell.find(f"{SVG}text").text for cell in cells]
    assert numbers == [str(one.batch) for one in played.operations]
    notes = {text.text for text in root.iter(f"{SVG}text") if text.get("class") == "note"}
    assert {"warm-up", "drain", "the way of batch 2"} <= notes | ({"warm-up"} if spec.K == 1 else set())
    assert (("recompute" in notes), {"forward", "backward"} <= notes) == (any(recomputes(spec)), True)


def test_the_svg_needs_nothing_else_and_has_colours_for_dark_pages() -> None:
    document = schedule_svg(Staleness.dsp(3))
    assert "prefers-color-scheme:dark" in document
    assert set(re.findall(r"https?://[^\"]*", document)) == {"http://www.w3.org/2000/svg"}
    assert document == schedule_svg(Staleness.dsp(3))


def test_a_schedule_of_no_batch_is_an_empty_picture() -> None:
    assert lines(schedule_text(Staleness.of(2), num_batches=0)) == [". idle"]
    root = ElementTree.fromstring(schedule_svg(Staleness.of(2), num_batches=0))
    assert list(root.iter(f"{SVG}g")) == []


def test_too_narrow_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="width=59"):
        schedule_text(Staleness.of(2), width=59)
