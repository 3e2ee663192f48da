"""Files of rows that can be read at any time."""

import os
import resource
import signal
from pathlib import Path

import pytest

from stretto.profile.rows import RowWriter, read_rows


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "x.rows", 3, {"what": "a test"}, block_rows=2)
    for at in range(5):
        writer.write(at, at / 2, -at)
    writer.close()
    header, rows = read_rows(tmp_path / "x.rows")
    assert header == {"what": "a test", "num_columns": 3}
    assert rows.tolist() == [[at, at / 2, -at] for at in range(5)]


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.rows"
    writer = RowWriter(path, 2, {})
    writer.write(1, 2)
    writer.write(3, 4)
    writer.close()
    os.truncate(path, path.stat().st_size - 5)
    assert read_rows(path)[1].tolist() == [[1, 2]]


def test_a_folder_that_is_gone_ends_the_recording_and_says_so(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "gone" / "x.rows", 1, {}, block_rows=1)
    writer.write(1)
    writer.write(2)
    writer.close()
    assert writer.error is not None
    assert "No such file" in writer.error


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.rows"
    path.write_text("not rows")
    with pytest.raises(ValueError, match="expected a line of JSON and rows of numbers, found b'not rows'"):
        read_rows(path)


def test_a_file_ends_at_its_largest_number_of_rows_and_says_so(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "x.rows", 1, {}, max_rows=3)
    for at in range(5):
        writer.write(at)
    writer.close()
    assert read_rows(tmp_path / "x.rows")[1].tolist() == [[0], [1], [2]]
    assert writer.error == "it ends at row 3, so as not to fill the disk"


def test_a_closed_file_is_continued(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "x.rows", 1, {})
    for at in range(3):
        writer.write(at)
        writer.close()
    assert read_rows(tmp_path / "x.rows")[1].tolist() == [[0], [1], [2]]


def test_a_row_that_finds_no_room_ends_the_recording(tmp_path: Path) -> None:
    """A limit of the file's size that falls into the second row, as a full disk; later there is room again."""
    writer = RowWriter(tmp_path / "x.rows", 2, {}, block_rows=1)
    writer.write(1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "x.rows").stat().st_size + 5, hard))
    writer.write(3, 4)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
    writer.write(5, 6)
    writer.close()
    assert read_rows(tmp_path / "x.rows")[1].tolist() == [[1, 2]]
    assert writer.error is not None
    assert "No space left" in writer.error
