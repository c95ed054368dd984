"""Which checkpoints are proven: those after which a step was finite.

The step that makes numbers leave their range is the one before that in which they have left it: its weights are finite,
and a checkpoint of them goes on to the same end at any rate. So checkpoint k is proven once step k + 1 is finite. A
run that stops because a step was not writes down the last finite one; resuming passes over checkpoints from there on
and lays them aside. A run that was killed has written nothing: its newest checkpoint is as good as any.

    checkpoints/not-finite.json     {"last_finite": 17}, of a run that stopped so; gone once a run goes on
    checkpoints/step-17.unproven    laid aside; under its old name elsewhere, checkpoint.resume takes it
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from cai_mesh.files import write_text

MARK = "not-finite.json"
LAST_FINITE = "last_finite"
UNPROVEN = "unproven"


def mark(checkpoints: Path, last_finite: int) -> None:
    """Write down that a run has stopped because no step after `last_finite` was finite."""
    write_text(checkpoints / MARK, json.dumps({LAST_FINITE: last_finite}))


def unproven(checkpoints: Path, steps: Iterable[Path]) -> set[Path]:
    """Return the checkpoints among `steps` that a run which stopped in `checkpoints` has left unproven."""
    try:
        last_finite = json.loads((checkpoints / MARK).read_text(encoding="utf-8"))[LAST_FINITE]
        return {step for step in steps if int(step.name.partition("-")[2]) >= int(last_finite)}
    except (OSError, ValueError, TypeError, KeyError):  # none, or damaged: nothing is known
        return set()


def lay_aside(checkpoints: Path, steps: Iterable[Path]) -> None:
    """Give checkpoints that a run has passed over other names, as it will save these steps anew; take the mark away."""
    for step in steps:
        names = (step.with_name(f"{step.name}.{UNPROVEN}{'' if n == 0 else f'-{n}'}") for n in count())
        step.rename(next(name for name in names if not os.path.lexists(name)))
    (checkpoints / MARK).unlink(missing_ok=True)
