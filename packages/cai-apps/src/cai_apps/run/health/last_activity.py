"""The last activity of a rank, written where its launcher finds it if the rank dies without a word."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path

from cai_apps.run.files.directory import RunDirectory

RUN, DOING, AT = "cai_run", "cai_doing", "cai_at"
"""Keys of the file beside those of torch's elastic agent."""
AT_BYTES = 160


class LastActivity:
    """Keeps the file that the elastic agent reads when a rank fails; a traceback takes its place.

    What it is at within a step changes too often to be written: it lies in a mapped file beside the other, which
    outlives the process. Without an agent nothing is written.
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        self._file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self.doing, self.at = "", ""
        self.at_file: str | None = None
        self._map: mmap.mmap | None = None
        if self._file is not None:
            self.at_file = f"{self._file}.at"
            with contextlib.suppress(OSError):
                Path(self.at_file).write_bytes(bytes(AT_BYTES))
                with open(self.at_file, "r+b") as file:
                    self._map = mmap.mmap(file.fileno(), AT_BYTES)

    def record_at(self, at: str) -> None:
        """Writes what it is at from now on within what it does; "" for nothing in particular. Takes a microsecond."""
        self.at = at
        if self._map is not None:
            self._map[:] = at.encode()[:AT_BYTES].ljust(AT_BYTES, b"\0")

    def record(self, doing: str) -> None:
        """Replaces what was written before."""
        self.doing = doing
        if self._file is None:
            return
        record = {
            "message": f"left no traceback; last seen in {doing} of {self._run.path}",
            "timestamp": int(time.time()),
            RUN: str(self._run.path),
            DOING: doing,
            AT: self.at_file,
        }
        path = Path(self._file)
        with contextlib.suppress(OSError):
            path.with_suffix(".new").write_text(json.dumps(record), encoding="utf-8")
            path.with_suffix(".new").replace(path)


def last_done(record: Mapping[str, object]) -> str:
    """The last activity of a rank, by its file; empty where it has none."""
    return f"{record.get(DOING, '')}{read_at(record.get(AT))}"


def read_at(file: object) -> str:
    """The text ", at ..." by another rank's mapped file; empty where there is nothing."""
    if not isinstance(file, str):
        return ""
    try:
        at = Path(file).read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""
    return f", at {at}" if at else ""
