"""The run and the checkpoint that a path means."""

from __future__ import annotations

from pathlib import Path

from cai_apps.run.files import proof
from cai_apps.run.files.directory import RunDirectory
from cai_mesh import checkpoint
from cai_mesh.errors import CheckpointError


def find_run(path: Path) -> tuple[RunDirectory, Path]:
    """The run that a run directory or one of its checkpoints belongs to, and the checkpoint meant.

    Raises:
        CheckpointError: the path is neither, or the run has no checkpoint that verifies.
    """
    path = path.expanduser().absolute()
    for directory in (path, path.parent, path.parent.parent):
        run = RunDirectory(directory)
        if run.config_file.is_file():
            break
    else:
        raise CheckpointError(
            f"neither a run directory nor a checkpoint of one: {path}",
            expected="RUN_DIR, RUN_DIR/best, or RUN_DIR/checkpoints/step-N",
        )
    if path == run.best:
        found = checkpoint.newest_good(run.best)[0]
    else:
        found = path if path.parent in (run.checkpoints, run.best) else _newest(run)
    if found is None:
        raise CheckpointError(
            f"the run {run.path} has no checkpoint that verifies"
            + (" in best/: checkpoint.best keeps one there" if path == run.best else ""),
            fix="`cai verify` says why",
        )
    return run, found


def _newest(run: RunDirectory) -> Path | None:
    """Return the newest checkpoint of a run that verifies and is not left unproven; None: there is none."""
    unproven = proof.unproven(run.checkpoints, checkpoint.steps(run.checkpoints))
    newest = checkpoint.newest_good(run.checkpoints)[0]
    while newest in unproven:
        newest = checkpoint.newest_good(run.checkpoints, before=newest)[0]
    return newest
