"""Checkpoints of a run: the session's state and the run's position, saved by any layout and resumed on any other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cai_apps.config import Config
from cai_apps.loop import Position
from cai_apps.run_directory import RunDirectory
from cai_mesh import checkpoint
from cai_mesh.errors import CheckpointError

if TYPE_CHECKING:
    from cai_apps.apply import Session

AUTO, NEVER = "auto", "never"
POSITION = "train"


def save(session: Session, run: RunDirectory, position: Position) -> None:
    """Writes checkpoints/step-N. Collective."""
    state = {**session.state(), POSITION: asdict(position)}
    checkpoint.save(run.checkpoints, state, step=position.step, keep_last=session.config.checkpoint.keep_last)


def is_due(config: Config, position: Position) -> bool:
    """Whether a step is followed by a checkpoint."""
    every = config.checkpoint.every
    return position.step == config.train.steps or bool(every and position.step % every == 0)


def resume(session: Session, run: RunDirectory) -> Position:
    """Loads what `checkpoint.resume` names into the session; the position to go on from. Collective.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model, or is further than the run goes.
    """
    wanted = session.config.checkpoint.resume
    if wanted == NEVER:
        return Position()
    source = checkpoint.latest(run.checkpoints) if wanted == AUTO else Path(wanted).expanduser()
    if source is None:
        return Position()
    values = checkpoint.load(source, {**session.state(), POSITION: {}})
    position = Position(**values[POSITION])
    if position.step > session.config.train.steps:
        raise CheckpointError(
            f"the checkpoint {source} is past the end of the run",
            got=f"step {position.step}",
            expected=f"at most train.steps = {session.config.train.steps}",
            fix='raise train.steps or set checkpoint.resume to "never"',
        )
    session.loaded(values, position.step)
    return position
