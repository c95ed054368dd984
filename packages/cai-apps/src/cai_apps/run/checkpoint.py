"""Checkpoints of a run: the session's state and the run's position, saved by any layout and resumed on any other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from cai_apps.compose.average import AVERAGE
from cai_apps.config.sections import RunConfig
from cai_apps.run.directory import RunDirectory
from cai_apps.run.position import Position
from cai_mesh import checkpoint
from cai_mesh.errors import CheckpointError

if TYPE_CHECKING:
    from cai_apps.compose.session import Session

AUTO, NEVER = "auto", "never"
POSITION = "train"


def check(config: RunConfig, run: RunDirectory) -> None:
    """What can be known before ranks start.

    Raises:
        CheckpointError: there is nothing to resume from at `checkpoint.resume`, or a run that does not resume from
            its own directory would write over the checkpoints there.
    """
    wanted = config.checkpoint.resume
    if wanted == AUTO:
        return
    if wanted != NEVER and not Path(wanted).expanduser().is_dir():
        raise CheckpointError(
            f"no checkpoint at checkpoint.resume = {wanted!r}",
            expected="auto, never, or the directory of a checkpoint or of checkpoints",
        )
    held = checkpoint.steps(run.checkpoints)
    if held:
        raise CheckpointError(
            f"{run.checkpoints} already has checkpoints",
            got=", ".join(path.name for path in held),
            cause=f"with checkpoint.resume = {wanted!r} this run would write its own among them",
            fix='choose another log.directory, delete them, or set checkpoint.resume to "auto"',
        )


class Saver:
    """Writes checkpoints/step-N of a run; with `checkpoint.background` while training goes on.

    There is one write at a time: the next save waits for it, and with it for the host copy it reads from.
    """

    def __init__(self, session: Session, run: RunDirectory):
        self._session, self._run = session, run
        self._options = session.config.checkpoint
        apart = self._options.background and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if apart else None
        self._last: checkpoint.Saving | None = None

    def save(self, position: Position) -> None:
        """Save the session and the position it has reached. Collective."""
        self.wait()
        self._last = checkpoint.save(
            self._run.checkpoints,
            {**self._session.state(), POSITION: asdict(position)},
            step=position.step,
            keep_last=self._options.keep_last,
            async_=self._options.background,
            group=self._group,
        )

    def wait(self) -> None:
        """Return once the last save is committed; raises what kept it from that."""
        if self._last is not None:
            self._last.wait()


def is_due(config: RunConfig, position: Position) -> bool:
    """Whether a step is followed by a checkpoint."""
    every, last = config.checkpoint.every, position.step == config.train.steps
    return (last and config.checkpoint.final) or bool(every and position.step % every == 0)


def resume(session: Session, run: RunDirectory) -> Position:
    """Loads what `checkpoint.resume` names into the session; the position to go on from. Collective.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model, or is further than the run goes.
    """
    source = _source(session.config, run)
    if source is None:
        return Position()
    values = _load(session, source)
    position = Position(**values[POSITION])
    if position.step > session.config.train.steps:
        raise CheckpointError(
            f"the checkpoint {source} is past the end of the run",
            got=f"step {position.step}",
            expected=f"at most train.steps = {session.config.train.steps}",
            fix='raise train.steps or set checkpoint.resume to "never"',
        )
    session.loaded(values, position.step)
    if dist.get_rank() == 0:
        print(f"resumed from {source}", flush=True)
    return position


def _load(session: Session, source: Path) -> dict:
    """Fills the session; an average that the checkpoint lacks begins with its weights."""
    state = session.state()
    averaged = any(name.startswith(AVERAGE) for name in checkpoint.contents(source).tensors)
    if session.average is None or averaged:
        return checkpoint.load(source, state)
    values = checkpoint.load(
        source, {name: value for name, value in state.items() if not name.startswith(AVERAGE)}
    )
    session.average.restart()
    return values


def _source(config: RunConfig, run: RunDirectory) -> Path | None:
    wanted = config.checkpoint.resume
    if wanted == NEVER:
        return None
    if wanted != AUTO:
        return Path(wanted).expanduser()
    found, damaged = checkpoint.newest_good(run.checkpoints)
    if damaged and dist.get_rank() == 0:
        print("passing over damaged checkpoints:", *damaged, sep="\n  ", flush=True)
    return found
