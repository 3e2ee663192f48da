"""The report on a terminal."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from stretto.console import console as open_console
from stretto.profile import view
from stretto.profile.report import print_report
from stretto.profile.schema import RunRecord
from tests.profile import records

RECORDS = {
    each.__name__: each for each in (records.starved, records.straggling, records.unrecognised, records.killed)
}


def printed(record: RunRecord, width: int = 120, **settings: bool) -> str:
    file = io.StringIO()
    print_report(record, Console(file=file, width=width, **settings))
    return file.getvalue()


def test_verdict_comes_first_evidence_second_and_the_next_step_last() -> None:
    record = records.starved()
    lines = printed(record).splitlines()
    assert lines[0] == record["verdict"]
    headings = [line for line in lines if line in {"Where the time went", "Evidence", "Also found", "Next step"}]
    assert headings == ["Where the time went", "Evidence", "Also found", "Next step"]
    assert lines[-3:] == [
        record["next_step"],
        "To try without an edit (Start 8 workers instead of 2):",
        "  stretto run --workers 8 -- python train.py --data photos",
    ]


def test_a_profile_of_a_program_has_nothing_to_try_from_outside() -> None:
    record = records.starved()
    record["options"] = {"updates": 100, "warmup": 10}
    assert printed(record).splitlines()[-1] == record["next_step"]


def test_the_bar_of_a_rank_has_the_parts_of_its_time() -> None:
    bar = re.search("█+░+▒*▓*·*", printed(records.starved(), 120))
    assert bar is not None
    assert {block: bar[0].count(block) for block in "█░▒▓·"} == {"█": 9, "░": 24, "▒": 1, "▓": 0, "·": 2}


def test_parts_are_in_percent_and_add_up() -> None:
    row = next(line for line in printed(records.starved()).splitlines() if line.startswith("0 "))
    percents = [float(number) for number in re.findall(r"([\d.]+) %", row)]
    assert percents == [25.2, 67.1, 2.80, 0.699, 4.20]


def test_every_advice_has_a_row_with_its_numbers() -> None:
    lines = printed(records.starved()).splitlines()
    row = next(line for line in lines if "Echo after decode" in line)
    assert row.split("  ")[0] == "2. Echo after decode, 3 uses each"
    assert re.split(r" {2,}", row.strip())[1:] == [
        "3.21",
        "3.00",
        "4,096 (2.30 GiB)",
        "42.0",
        "895",
        "3.00x",
        "2.61x",
    ]


def test_each_rank_has_a_row_and_the_straggler_is_named() -> None:
    record = records.straggling()
    lines = printed(record).splitlines()
    assert [line[0] for line in lines if "█" in line and " s " in line][:2] == ["0", "1"]
    assert record["straggler"] in lines


def test_stages_are_split_into_computing_and_waiting() -> None:
    line = next(line for line in printed(records.starved()).splitlines() if line.startswith("read "))
    assert re.split(r" {2,}", line.strip())[2:] == ["79.2 %", "1.62 ms", "50.0 us", "1.57 ms", "108 KiB"]
    assert line.count("░") > 10 * line.count("█")


def test_a_signal_is_said_plainly() -> None:
    lines = printed(records.killed()).splitlines()
    assert lines[1] == "The command was ended by SIGKILL after 812 ms; this is what was recorded until then."
    assert lines[2] == "- Rank 0: killed by SIGKILL."


def test_an_exit_code_is_said_plainly() -> None:
    lines = printed({**records.starved(), "exit_code": 3}).splitlines()
    assert lines[1] == "The command ended with exit code 3 after 75.2 s; this is what was recorded until then."
    assert "exit code" not in printed(records.starved())


def test_what_needs_nothing_gives_its_reason_instead_of_a_table() -> None:
    nothing = records.advice("none", "Change nothing", why="R is 0.400: echoing cannot help.")
    lines = printed({**records.starved(), "advice": [nothing]}).splitlines()
    assert "- Change nothing: R is 0.400: echoing cannot help." in lines
    assert not any("speed-up" in line for line in lines)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_except_commands(name: str, width: int) -> None:
    lines = printed(RECORDS[name](), width).splitlines()
    assert not [line for line in lines if cell_len(line) > width and "stretto run" not in line]
    assert not any("…" in line or "None" in line for line in lines)


def test_a_narrow_terminal_loses_no_advice_and_no_part() -> None:
    text = " ".join(printed(records.starved(), 40).split())
    for words in (
        "Echo whole batches",
        "speed-up 2.00x, measured 1.31x",
        "first batches 2.80 %",
        "transfer 0.699 %",
    ):
        assert words in text


def test_without_a_terminal_there_are_no_codes_and_120_columns() -> None:
    file = io.StringIO()
    console = open_console(file)
    assert console.width == 120
    print_report(records.straggling(), console)
    assert "\x1b" not in file.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[\d;]*3[0-7]m")
    assert colour.search(printed(records.starved(), force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(printed(records.starved(), force_terminal=True))


@pytest.mark.parametrize("width", [60, 120])
def test_names_of_the_script_are_never_markup(width: int) -> None:
    name = "[red]x[/] [/nothing] :smile:"
    text = " ".join(printed(records.with_names(name), width).split())
    # Verdict, two ranks, straggler, evidence, finding, next step; two in a heading; stages; advice; what to try.
    assert text.count(name) == 7 + 2 + 4 + 4 + 3


def test_control_characters_of_the_script_do_not_reach_the_terminal() -> None:
    text = printed(records.with_names("a\x1b[2Jb\x07\udcff"))
    assert r"a\x1b[2Jb\x07\udcff" in text
    assert not set(text) & {"\x1b", "\x07", "\udcff"}


def test_an_output_without_unicode_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_report(records.with_names("Gerät"), Console(file=file, width=120))
    file.flush()
    text = file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert r"Ger\xe4t" in text
    assert re.search(r"#+\.+:-", text)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (view.duration(None), "-"),
        (view.duration(float("nan")), "-"),
        (view.duration(0), "0 s"),
        (view.duration(0.0123456), "12.3 ms"),
        (view.duration(0.0009999), "1.00 ms"),
        (view.duration(119.99), "2.00 min"),
        (view.duration(7300), "2.03 h"),
        (view.size(0), "0 B"),
        (view.size(1536), "1.50 KiB"),
        (view.size(96 * 2**20), "96.0 MiB"),
        (view.percent(100.0), "100 %"),
        (view.percent(0.001), "0 %"),
        (view.fraction(0.123456), "12.3 %"),
        (view.number(9.996), "10.0"),
        (view.number(1234.5), "1,230"),
        (view.times(float("inf")), "-"),
        (view.count(1234.0), "1,234"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(shown: str, expected: str) -> None:
    assert shown == expected


def test_insertion_points_are_those_of_the_advice_else_the_loaders_end() -> None:
    assert view.insertion_points(records.starved()) == [
        ("after decode", 3.21),
        ("examples after the loader", 3.67),
        ("whole batches", 3.67),
    ]
    assert view.insertion_points({**records.starved(), "advice": []}) == [("after the loader", 3.67)]
    assert view.insertion_points(records.unrecognised()) == []
