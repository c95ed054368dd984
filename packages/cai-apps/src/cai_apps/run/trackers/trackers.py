"""All trackers of a run, as its first rank has them."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cai_apps.config.sections import RunConfig, Tracker
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.git_state import git_state
from cai_apps.run.files.position import VALIDATION
from cai_apps.run.trackers.lane import Lane
from cai_apps.run.trackers.table import ROWS
from cai_apps.run.trackers.writer import Identity
from cai_mesh.files import write_text

FILE = "trackers.json"
"""The file of a run directory with the id of the run and the trackers that know it."""
SECONDS = 20.0
"""Seconds that trackers have to finish, all together."""
NAMES = {
    "lr": "train/learning_rate",
    "validation_loss": "eval/loss",
    "validation_accuracy": "eval/accuracy",
    "validation_perplexity": "eval/perplexity",
}
"""Names of numbers as the Trainer of transformers has them; all others are `train/NAME`, by their fields."""


class Trackers:
    """Writes steps to all trackers of a config. Nothing here waits for them but `close`, and that not for long.

    Args:
        config: the config, which they record with the state of the repository around the working directory.
        run: the run's directory, in which the id is kept.
        step: steps that are done.
        written: the last step of which an earlier start has left a record; 0: none.
    """

    def __init__(self, config: RunConfig, run: RunDirectory, *, step: int, written: int):
        self._lanes: list[tuple[Lane, int]] = []
        names = config.log.trackers
        if not names:
            return
        id, before, written = _known(run, names, new=step == 0, written=written)
        identity = Identity(id, run.path.name, config.log.project, run.path, step + 1)
        recorded = json.loads(json.dumps(asdict(config) | git_state()))
        for name in names:
            row = ROWS[name]
            lane = Lane(name, row.open())
            lane.start(recorded, identity)
            again = name in before and not row.rewinds
            self._lanes.append((lane, written if again else 0))

    def record(self, record: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Have a record of metrics.jsonl written, and texts by name."""
        step, values = record["step"], scalars_of(record)
        for lane, written in self._lanes:
            if step > written:
                lane.scalars(step, values)
                for name, text in texts.items():
                    lane.text(step, name, text)

    def close(self) -> None:
        """Let all of them finish."""
        until = time.monotonic() + SECONDS
        for lane, _ in self._lanes:
            lane.end()
        for lane, _ in self._lanes:
            lane.close(max(0.0, until - time.monotonic()))


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by the names that trackers have for them."""
    numbers = {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
    return {NAMES.get(name) or _name(name): value for name, value in numbers.items()}


def _name(field: str) -> str:
    """Return the name of a number that `NAMES` does not have."""
    return f"eval/{field.removeprefix(VALIDATION)}" if field.startswith(VALIDATION) else f"train/{field}"


def _known(
    run: RunDirectory, names: Sequence[Tracker], *, new: bool, written: int
) -> tuple[str, set[str], int]:
    """Return the id of a run, the trackers that knew it before, and the last step of which they may have a record.

    A run from its beginning is another one. Records of steps that are done again are cut off, so the last one that is
    left is not the last that there was.
    """
    file = run.path / FILE
    try:
        table = {} if new else json.loads(file.read_text(encoding="utf-8"))
        id, before = str(table["id"]), set(map(str, table["trackers"]))
        written = max(written, int(table.get("written", 0)))
    except (OSError, ValueError, KeyError, TypeError):  # none, or damaged: a new one
        id, before = uuid.uuid4().hex[:12], set()
    table = {"id": id, "trackers": sorted(before | {*names}), "written": written}
    write_text(file, json.dumps(table))
    return id, before, written
