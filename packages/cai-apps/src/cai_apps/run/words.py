"""What a rank does, written where its launcher finds it if the rank dies without a word."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from cai_apps.run.directory import RunDirectory

RUN, DOING = "cai_run", "cai_doing"
"""Keys of the file beside those of torch's elastic agent."""


class LastWords:
    """Keeps the file that the elastic agent reads when a rank fails; a traceback takes its place.

    Without an agent nothing is written.
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        self._file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self.doing = ""

    def say(self, doing: str) -> None:
        """Replace what was said before."""
        self.doing = doing
        if self._file is None:
            return
        said = {
            "message": f"left no traceback; last seen in {doing} of {self._run.path}",
            "timestamp": int(time.time()),
            RUN: str(self._run.path),
            DOING: doing,
        }
        path = Path(self._file)
        with contextlib.suppress(OSError):
            path.with_suffix(".new").write_text(json.dumps(said), encoding="utf-8")
            path.with_suffix(".new").replace(path)
