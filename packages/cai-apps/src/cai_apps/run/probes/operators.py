"""Traces of a rank's operators, by torch's profiler.

RUN_DIR/traces/rank-0.steps-10-12.json.gz     for ui.perfetto.dev or chrome://tracing
               rank-0.steps-10-12.table.json  its operators by time, for `cai report`
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cai_mesh.files import folder, write_text

FOLDER, TABLE = "traces", ".table.json"
ROWS = 20
"""Operators of a table: those that take most."""


class OperatorTrace:
    """Traces some consecutive steps of this rank; nothing at all in the others.

    Args:
        steps: the steps; of a run that goes on in the middle of them, those that are left.
        directory: the run's directory.
        rank: this rank's number.
        device: this rank's device.
    """

    def __init__(self, steps: range, directory: Path, rank: int, device: torch.device):
        self._steps, self._folder, self._rank, self._device = steps, directory / FOLDER, rank, device
        self._profile: profile | None = None
        self._mark = ExitStack()
        self._first = self._last = 0

    def before(self, step: int) -> None:
        """Called before every step."""
        if step not in self._steps:
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._first, self._profile = step, profile(activities=activities, acc_events=True)
            self._profile.start()
        self._mark.enter_context(record_function(f"step {step}"))

    def after(self, step: int) -> Path | None:
        """Called after every step; returns the trace that was written after the last of them."""
        if self._profile is None:
            return None
        self._mark.close()
        self._last = step
        return self.close() if step == self._steps[-1] else None

    def close(self) -> Path | None:
        """Write what has been traced; return the file, None where there is none to write."""
        traced, self._profile = self._profile, None
        if traced is None:
            return None
        self._mark.close()
        traced.stop()
        last = max(self._first, self._last)
        name = f"rank-{self._rank}.steps-{self._first}-{last}"
        path, scratch = (
            folder(self._folder, mode=0o700) / f"{name}.json.gz",
            self._folder / f".{name}.json.gz",
        )
        scratch.unlink(missing_ok=True)  # a link may lie there
        traced.export_chrome_trace(str(scratch))
        os.replace(scratch, path)
        write_text(self._folder / f"{name}{TABLE}", json.dumps(_table(traced)))
        return path


def _table(traced: profile) -> list[dict[str, Any]]:
    """Return the operators that take most time by themselves, on a GPU where one was traced."""
    rows = [
        {
            "operator": event.key,
            "calls": int(event.count),
            "host_ms": event.self_cpu_time_total / 1e3,
            "device_ms": event.self_device_time_total / 1e3,
        }
        for event in traced.key_averages()
        if not event.key.startswith("step ")
    ]
    return sorted(rows, key=lambda row: (row["device_ms"], row["host_ms"]), reverse=True)[:ROWS]
