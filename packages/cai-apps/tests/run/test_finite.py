"""What is not finite is never saved, and never gone on from, on any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import Case, session_of, train_steps

from cai_apps.run.files import checkpoint
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Position
from cai_mesh import checkpoint as files
from cai_mesh.errors import CheckpointError, DataError
from cai_mesh.testing import run_ranks

ORIGIN = Origin({}, "tokens", "8 sequences")
LAYOUTS = {
    "one": Case(),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2": Case(tensor=2),
    "pipeline2": Case(pipeline=2),
}


def poison(session, value, rank):
    """One number of one tensor, on one rank alone; its name."""
    found = [""]
    if dist.get_rank() == rank:
        name, boxed = next((n, b) for n, b in session.state().items() if n.startswith("model.") and b.pieces)
        boxed.pieces[-1][1].flatten()[-1:].copy_(torch.tensor([value]))
        found = [name]
    dist.broadcast_object_list(found, src=rank)
    return found[0]


def save_poisoned(case, directory, value):
    session = session_of("gpt2", case, "fp32", 8)
    train_steps(session, case, 0, 1)
    saver = checkpoint.Saver(session, RunDirectory(directory), ORIGIN)
    saver.save(Position(1, 8, 8))
    name = poison(session, value, dist.get_world_size() - 1)
    with pytest.raises(DataError, match="is not finite, and is not saved") as raised:
        saver.save(Position(2, 16, 16))
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("layout", "value"), [*((name, float("nan")) for name in LAYOUTS), ("one", float("inf"))]
)
def test_is_not_saved(layout, value, tmp_path):
    case = LAYOUTS[layout]
    run_ranks(case.world, save_poisoned, case, tmp_path, value, timeout=240)
    assert [path.name for path in files.steps(tmp_path / "checkpoints")] == ["step-1"]


def sealed(case, directory, *, good):
    """A checkpoint that is not finite, as older versions and other programs may write it; before it a good one."""
    session = session_of("gpt2", case, "fp32", 8)
    run = RunDirectory(directory)
    if good:
        checkpoint.Saver(session, run, ORIGIN).save(Position(1, 8, 8))
    poison(session, float("nan"), 0)  # of copies the first is written
    state = {**session.state(), checkpoint.POSITION: {"step": 2, "samples": 16, "units": 16}}
    files.save(run.checkpoints, state, step=2)


def resumed(case, directory, wanted="auto"):
    session = session_of("gpt2", case, "fp32", 8)
    config = replace(session.config, checkpoint=replace(session.config.checkpoint, resume=wanted))
    session.config = config
    return checkpoint.resume(session, RunDirectory(directory), ORIGIN).step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_passed_over_by_resume(layout, tmp_path):
    case = LAYOUTS[layout]
    run_ranks(case.world, sealed, case, tmp_path, timeout=240, good=True)
    files.verify(tmp_path / "checkpoints/step-2")  # as it was written
    assert set(run_ranks(case.world, resumed, case, tmp_path, timeout=240)) == {1}


def test_is_refused_where_there_is_nothing_else(tmp_path):
    run_ranks(1, sealed, Case(), tmp_path, good=False)
    run_ranks(1, refuses, tmp_path)


def refuses(directory):
    with pytest.raises(CheckpointError, match="can be gone on from") as raised:
        resumed(Case(), directory)
    assert "step-2: not finite: model." in str(raised.value)
    with pytest.raises(CheckpointError, match="step-2 is not finite"):
        resumed(Case(), directory, str(directory / "checkpoints/step-2"))
