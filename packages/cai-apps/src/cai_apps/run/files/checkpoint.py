"""Checkpoints of a run: the session's state and the run's position, saved by any layout and resumed on any other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from cai_apps.compose.average import AVERAGE
from cai_apps.config.sections import RunConfig
from cai_apps.run.files import origin as origins
from cai_apps.run.files import proof, room
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.finite import not_finite
from cai_apps.run.files.origin import ORIGIN, Origin
from cai_apps.run.files.position import Position
from cai_mesh import checkpoint
from cai_mesh.errors import CheckpointError, DataError
from cai_mesh.files import folder, remove

if TYPE_CHECKING:
    from cai_apps.compose.session import Session

AUTO, NEVER = "auto", "never"
POSITION = "train"
SHOWN = 4
"""Names in an error."""
LEAST_KEPT = 2
"""Checkpoints that are always kept: the newest, and the one before it, which is proven by the steps between."""


def check(config: RunConfig, run: RunDirectory) -> None:
    """What can be known before ranks start.

    Raises:
        CheckpointError: there is nothing to resume from at `checkpoint.resume`, or a run that does not resume from
            its own directory would write over the checkpoints there.
    """
    resume_from = config.checkpoint.resume
    if resume_from == AUTO:
        return
    if resume_from != NEVER and not Path(resume_from).expanduser().is_dir():
        raise CheckpointError(
            f"no checkpoint at checkpoint.resume = {resume_from!r}",
            expected="auto, never, or the directory of a checkpoint or of checkpoints",
        )
    if resume_from != NEVER:
        _check_source(Path(resume_from).expanduser())
    checkpoints = checkpoint.steps(run.checkpoints)
    if checkpoints:
        raise CheckpointError(
            f"{run.checkpoints} already has checkpoints",
            got=", ".join(path.name for path in checkpoints),
            cause=f"with checkpoint.resume = {resume_from!r} this run would write its own among them",
            fix='choose another log.directory, delete them, or set checkpoint.resume to "auto"',
        )


def _check_source(source: Path) -> None:
    """Raises CheckpointError for a directory that neither is a checkpoint nor holds one."""
    if not (source / "manifest.json").is_file() and not checkpoint.steps(source):
        raise CheckpointError(
            f"there is no checkpoint in {source}",
            expected="a directory step-N with a manifest.json, or one that holds such",
            fix="name RUN_DIR/checkpoints, or one of the checkpoints there",
        )


def goes_on(config: RunConfig, run: RunDirectory) -> bool:
    """Whether a run will look for checkpoints of its own directory, and there are some."""
    return config.checkpoint.resume == AUTO and bool(checkpoint.steps(run.checkpoints))


def newest(config: RunConfig, run: RunDirectory) -> Path | None:
    """Return the newest checkpoint of what a run goes on from; None: it begins anew, or the newest is damaged."""
    wanted = config.checkpoint.resume
    if wanted == NEVER:
        return None
    source = run.checkpoints if wanted == AUTO else Path(wanted).expanduser()
    found = [source] if (source / "manifest.json").is_file() else checkpoint.steps(source)
    try:
        checkpoint.contents(found[-1])
    except (CheckpointError, IndexError):
        return None
    return found[-1]


def run_before(config: RunConfig, run: RunDirectory) -> RunDirectory | None:
    """Return the run whose checkpoint a run goes on from; None: it begins anew, or the checkpoint lies alone."""
    source = newest(config, run)
    if source is None:
        return None
    before = RunDirectory(source.absolute().parent.parent)
    return before if before.config_file.is_file() else None


class Saver:
    """Writes checkpoints/step-N of a run; with `checkpoint.background` while training goes on.

    There is one write at a time: the next save waits for it, and with it for the host copy it reads from. `step` is the
    last step that was saved; None: none was.
    """

    def __init__(self, session: Session, run: RunDirectory, origin: Origin):
        self._session, self._run, self._origin = session, run, origin
        self._options = session.config.checkpoint
        self._group: dist.ProcessGroup | None = None
        self._last: checkpoint.Saving | None = None
        self._size = room.checkpoint_bytes(session.state())
        self._since = time.monotonic()
        self._lacks_room = False
        self.step: int | None = None

    def by_clock(self) -> bool:
        """Whether `checkpoint.minutes` have passed on this rank since the last save, or the last without room."""
        minutes = self._options.minutes
        return minutes > 0 and time.monotonic() - self._since >= 60 * minutes

    def check_final(self, position: Position) -> None:
        """Raises ConfigError where steps are left and the checkpoint after the last has no room. Collective."""
        if self._options.final and position.step < self._session.config.train.steps:
            room.check_final(self._run.checkpoints, self._size)

    def save(self, position: Position, *, required: bool = True) -> None:
        """Save the session and the position it has reached. Collective.

        Args:
            position: the position.
            required: whether a disk without room ends the run; else there is a line, and no checkpoint.

        Raises:
            DataError: a weight, a moment or an average is not finite. Nothing is written then, for a run could not go
                on from it.
        """
        self.wait()
        self._since = time.monotonic()
        if not required and not self._has_room(position):
            return
        keep, state = self._options.keep_last, self._session.state()
        if broken := not_finite(state):
            raise DataError(
                f"what step {position.step} has left is not finite, and is not saved",
                got=_some(broken),
                cause="often a learning rate that is too high",
                fix="lower optimizer.lr or lengthen lr_schedule.warmup_steps, and go on from the checkpoint before",
            )
        self._last = checkpoint.save(
            self._run.checkpoints,
            {**state, POSITION: asdict(position), ORIGIN: self._origin.value()},
            step=position.step,
            keep_last=None if keep is None else max(keep, LEAST_KEPT),
            async_=not required and self._in_background(state),
            group=self._group,
        )
        self.step = position.step

    def save_best(self, position: Position) -> None:
        """Save what has the lowest validation loss, in place of what had it before. Collective.

        It is written before anything else happens; where the disk has no room there is a line, and the old one stays.

        Args:
            position: the position, whose last validation is the best.
        """
        self.wait()
        if not self._has_room(position):
            return
        state, best = self._session.state(), self._run.best
        if not_finite(state):  # an overflow that the next step ends the run for
            return
        if dist.get_rank() == 0:
            folder(best)
            remove(best / f"step-{position.step}")  # of a run that went on from before it
        dist.barrier()
        checkpoint.save(
            best, {**state, POSITION: asdict(position), ORIGIN: self._origin.value()}, step=position.step
        ).wait()
        if dist.get_rank() == 0:
            for older in checkpoint.steps(best):
                if older.name != f"step-{position.step}":
                    remove(older.rename(older.with_name(f"{older.name}.deleting")))
        dist.barrier()

    def _in_background(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is written while training goes on. Collective, as is the group that is made for it."""
        config = self._session.config
        if self._options.background == "auto":
            chosen = config.memory.nvme is None and room.has_memory(state, self._size)
        else:
            chosen = self._options.background == "on"
        if chosen and self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")  # type: ignore[assignment]
        return chosen

    def _has_room(self, position: Position) -> bool:
        """Whether a checkpoint on the way has room; say why not, once until there is some again. Collective."""
        reason = [""]
        if dist.get_rank() == 0:
            options = self._options
            reason[0] = room.make_room(
                self._run.checkpoints, self._size, options.keep_last, final=options.final
            )
            if reason[0] and not self._lacks_room:
                print(f"no checkpoint after step {position.step}: {reason[0]}", flush=True)
        dist.broadcast_object_list(reason)
        self._lacks_room = bool(reason[0])
        return not self._lacks_room

    def doubt(self, last_finite: int) -> None:
        """Write down that no step after `last_finite` was finite, by which checkpoints from there on are unproven."""
        with suppress(CheckpointError, OSError):  # what is raised already tells of the run's end
            self.wait()
        if dist.get_rank() == 0 and checkpoint.steps(self._run.checkpoints):
            proof.mark(self._run.checkpoints, last_finite)

    def wait(self) -> None:
        """Return once the last save is committed; raises what kept it from that."""
        if self._last is not None:
            self._last.wait()


def is_due(config: RunConfig, position: Position, *, left_out: bool = False, by_clock: bool = False) -> bool:
    """Whether a step is followed by a checkpoint.

    Args:
        config: the config of the run.
        position: the position after the step.
        left_out: whether the step has changed no weight.
        by_clock: whether `checkpoint.minutes` have passed.
    """
    every, last = config.checkpoint.every, position.step == config.train.steps
    by_steps = bool(every) and position.step % every == 0
    if last or position.standing.ends(config.early_stopping):
        return config.checkpoint.final or by_steps
    return (by_steps or by_clock) and not left_out


def resume(session: Session, run: RunDirectory, origin: Origin, *, new_data: bool = False) -> Position:
    """Loads what `checkpoint.resume` names into the session; the position to go on from. Collective.

    With "auto" the newest checkpoint is taken whose files verify, whose values are finite, and that is not left
    unproven by a run which stopped because a step was not finite (`proof`).

    Args:
        session: the session that is filled.
        run: the run that goes on.
        origin: the data that it learns from.
        new_data: whether that may be other data than the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, not finite or of another model, or is further than the run
            goes; or there are some, and none of them is whole and finite.
    """
    resume_from = session.config.checkpoint.resume
    if resume_from == NEVER:
        return Position()
    if resume_from != AUTO:
        source = Path(resume_from).expanduser()
        position, broken, values = _load(session, source)
        if broken:
            raise CheckpointError(
                f"{source} is not finite", got=_some(broken), fix="resume from an older one"
            )
    else:
        source, position, values = _newest(session, run)
    if source is not None:
        change = origins.check(origin, values, source, new_data=new_data)
        if dist.get_rank() == 0:
            print(f"resumed from {source}", *([change] if change else []), sep="\n", flush=True)
    return position


def _newest(session: Session, run: RunDirectory) -> tuple[Path | None, Position, dict[str, Any]]:
    """Load the newest checkpoint that verifies and is finite; return it, its position and its plain values."""
    passed, aside = list[str](), list[Path]()
    unproven = _unproven(run)
    source, damaged = checkpoint.newest_good(run.checkpoints)
    while source is not None:
        passed += damaged
        if source in unproven:
            passed.append(f"{source}: unproven: the step after it was not finite")
        else:
            position, broken, values = _load(session, source)
            if not broken:
                _pass_over(run, passed, aside)
                return source, position, values
            passed.append(f"{source}: not finite: {_some(broken)}")
        aside.append(source)
        source, damaged = checkpoint.newest_good(run.checkpoints, before=source)
    passed += damaged
    if passed:
        raise CheckpointError(
            f"no checkpoint in {run.checkpoints} can be gone on from",
            got="\n             ".join(passed),
            fix="name a good one with checkpoint.resume, or start anew with another log.directory",
        )
    return None, Position(), {}


def _unproven(run: RunDirectory) -> set[Path]:
    """Return what the first rank sees of unproven checkpoints."""
    seen = [proof.unproven(run.checkpoints, checkpoint.steps(run.checkpoints))]
    dist.broadcast_object_list(seen)
    return seen[0]


def _pass_over(run: RunDirectory, passed: list[str], aside: list[Path]) -> None:
    """Say which checkpoints are not gone on from, and lay aside those that are whole. Collective."""
    if dist.get_rank() == 0:
        if passed:
            print("passing over checkpoints:", *passed, sep="\n  ", flush=True)
        proof.lay_aside(run.checkpoints, aside)
    dist.barrier()


def _load(session: Session, source: Path) -> tuple[Position, list[str], dict[str, Any]]:
    """Fill the session; return its position then, what is not finite, and the checkpoint's plain values.

    An average that the checkpoint lacks begins with its weights; biases of routers that it lacks stay as they are.
    """
    state, stored = session.state(), checkpoint.contents(source).tensors
    averaged = any(name.startswith(AVERAGE) for name in stored)
    lacks = session.average is not None and not averaged
    unbiased = {name for name in session.biases() if name not in stored}
    target_state = {
        name: value
        for name, value in state.items()
        if name not in unbiased and not (lacks and name.startswith(AVERAGE))
    }
    values = checkpoint.load(source, target_state)
    position = Position.of_value(values[POSITION])
    if position.step > session.config.train.steps:
        raise CheckpointError(
            f"the checkpoint {source} is past the end of the run",
            got=f"step {position.step}",
            expected=f"at most train.steps = {session.config.train.steps}",
            fix='raise train.steps or set checkpoint.resume to "never"',
        )
    if lacks:
        assert session.average is not None
        session.average.restart()
    broken = not_finite(state)
    if not broken:
        session.loaded(values, position.step)
    return position, broken, values


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
