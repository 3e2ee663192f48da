"""Files of rows of numbers, appended as a run goes: a line of JSON that says what they are, then float64 values.

What has been written can be read at any time, also after the process was killed in the middle of a row.
"""

import contextlib
import errno
import json
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 2_000_000
"""Of one file: a million updates of a training process, 128 MB."""


class RowWriter:
    """Appends rows of `num_columns` numbers, in blocks.

    The file is opened with the first block, by the process that writes it. A full disk, a folder that is gone or
    `max_rows` ends the recording, never the training: `error` then says why.
    """

    def __init__(
        self,
        path: Path,
        num_columns: int,
        header: dict[str, Any],
        *,
        block_rows: int = 64,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.error: str | None = None
        self._path = path
        self._max_rows = max_rows
        self._num_rows = 0
        self._header = json.dumps({**header, "num_columns": num_columns}).encode() + b"\n"
        self._block = array("d")
        self._block_size = block_rows * num_columns
        self._file: int | None = None
        self._num_columns = num_columns

    def write(self, *row: float) -> None:
        """Append a row."""
        assert len(row) == self._num_columns, (len(row), self._num_columns)
        if self.error is not None:
            return
        if self._num_rows == self._max_rows:
            self.flush()
            self.error = self.error or f"it ends at row {self._num_rows:,}, so as not to fill the disk"
            return
        self._num_rows += 1
        self._block.extend(row)
        if len(self._block) >= self._block_size:
            self.flush()

    def flush(self) -> None:
        """Hand what has been written to the operating system."""
        if not self._block or self.error is not None:
            return
        block, self._block = self._block, array("d")
        # The header goes into a new file only: one that was closed is continued.
        data, self._header = self._header + block.tobytes(), b""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if os.write(self._file, data) < len(data):  # rows after a part of one could not be read
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.error = str(error)

    def close(self) -> None:
        """Flush, and close the file until more is written."""
        self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def read_rows(path: Path) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """The header of a file and its rows, [rows, columns]. A row that was cut off is left out.

    Raises ValueError if it is no such file.
    """
    data = path.read_bytes()
    line, newline, rest = data.partition(b"\n")
    try:
        header = json.loads(line)
        num_columns = header["num_columns"]
    except (ValueError, TypeError, KeyError):
        header = None
    if header is None or not newline:
        raise ValueError(f"{path}: expected a line of JSON and rows of numbers, found {data[:40]!r}")
    num_rows = len(rest) // (8 * num_columns)
    values = np.frombuffer(rest[: num_rows * num_columns * 8], dtype="<f8")
    return header, values.reshape(num_rows, num_columns)
