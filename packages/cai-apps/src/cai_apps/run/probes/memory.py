"""Snapshots of a GPU's memory.

RUN_DIR/snapshots/rank-0.step-10.pickle  torch's, for pytorch.org/memory_viz
                  rank-0.step-10.json    the step, the rank, and what was largest when most was taken, for `cai report`
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cai_apps.run.probes.allocations import fullest, out_of_memory
from cai_mesh.files import folder, write_text

FOLDER = "snapshots"
EVENTS = 200_000
"""Allocations and frees that are remembered."""
SITES = 25
"""Lines of code that are told: those that have taken most."""
NONE = "no snapshot: torch keeps no history of the memory of a CPU"


class MemoryHistory:
    """Remembers what a rank allocates on its GPU, and writes it down after some steps, or where memory has run out.

    Args:
        steps: the steps, after the last of which it is written down; none: nothing is remembered.
        directory: the run's directory.
        rank: this rank's number.
        chosen: whether this rank is one that writes after steps; where memory runs out each does.
        device: this rank's device.
    """

    def __init__(self, steps: range, directory: Path, rank: int, chosen: bool, device: torch.device):
        self._steps, self._folder, self._rank, self._chosen = steps, directory / FOLDER, rank, chosen
        self._device, self._step = device, 0
        self._remembers = bool(steps) and device.type == "cuda"
        if self._remembers:
            self._remember()

    def before(self, step: int) -> None:
        """Called before every step."""
        self._step = step
        if self._remembers and step == self._steps[0]:
            self._remember(clear_history=True)

    def after(self, step: int) -> Path | None:
        """Called after every step; returns what was written."""
        if not (self._chosen and self._steps and step == self._steps[-1]):
            return None
        if self._device.type != "cuda":
            return self._write(step, {"message": NONE})
        return self._dump(step, f"the fullest moment of steps {self._steps[0]} to {step}")

    def failed(self, error: BaseException) -> Path | None:
        """Write down what was there where memory has run out; return the file, None where nothing was."""
        if not (self._remembers and isinstance(error, torch.OutOfMemoryError)):
            return None
        return self._dump(self._step, "out of memory")

    def close(self) -> None:
        """Remember no more."""
        if self._remembers:
            self._remembers = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def _remember(self, **options: bool) -> None:
        torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python", **options)

    def _dump(self, step: int, reason: str) -> Path:
        snapshot: Any = torch.cuda.memory._snapshot()
        number = self._device.index or 0
        peak = fullest(snapshot, number)
        fields: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self._device),
            "reason": reason,
            "allocated_bytes": peak.bytes,
            "reserved_bytes": sum(s["total_size"] for s in snapshot["segments"] if s["device"] == number),
            "sites": [asdict(site) for site in peak.sites[:SITES]],
        }
        if (missing := out_of_memory(snapshot, number)) is not None and reason == "out of memory":
            fields["asked_bytes"], fields["free_bytes"] = missing
        path = self._write(step, fields)
        pickle = path.with_suffix(".pickle")
        pickle.unlink(missing_ok=True)  # a link may lie there
        torch.cuda.memory._dump_snapshot(str(pickle))
        return path

    def _write(self, step: int, fields: dict[str, Any]) -> Path:
        path = folder(self._folder, mode=0o700) / f"rank-{self._rank}.step-{step}.json"
        write_text(path, json.dumps({"rank": self._rank, "step": step, **fields}))
        return path
