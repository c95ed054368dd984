"""Every bit of a checkpoint counts, every part is of one save, and what fails on one rank fails on all."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import constant, held
from torch.distributed import checkpoint as dcp

from cai_mesh import checkpoint
from cai_mesh.checkpoint import commit, loading, manifest, saving
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import Layout, Shard, attach
from cai_mesh.testing import RankError, run_ranks

FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "values.json", "manifest.json"]


def sharded(number):
    """A state of two ranks: a row each."""
    state = {"w": torch.full((1, 3), float(number)), "value": number}
    attach(state["w"], Layout((2, 3)).then("r", 2, dist.get_rank(), Shard(0)))
    return state


def save_sharded(directory, number, step=1):
    checkpoint.save(directory, sharded(number), step=step)


def error_of(action):
    """What `action` says is wrong; fails when it finds nothing wrong."""
    try:
        found = action()
    except CheckpointError as error:
        return str(error)
    raise AssertionError(f"nothing was found wrong: {found}")


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "values.json", "manifest.json"])
def test_every_flipped_bit_is_found_and_its_file_named(file, tmp_path):
    state = {"w": torch.arange(6.0).view(2, 3), "extra": {"position": 12, "names": ["a", "b"]}}
    path = checkpoint.save(tmp_path, state, step=7).wait()
    checkpoint.contents(path)
    raw = (path / file).read_bytes()
    bits = range(0, len(raw) * 8, 1 if len(raw) < 300 else 11)
    for bit in bits:
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        (path / file).write_bytes(flipped)
        assert file in error_of(lambda: checkpoint.verify(path)), bit
        if file != "__0_0.distcp":
            assert file in error_of(lambda: checkpoint.contents(path)), bit
            assert file in error_of(lambda: checkpoint.load(path, state, verify=False)), bit
    for length in (*range(0, len(raw), 7), len(raw) - 1):
        (path / file).write_bytes(raw[:length])
        assert file in error_of(lambda: checkpoint.verify(path)), length
        assert file in error_of(lambda: checkpoint.load(path, state, verify=False)), length
    (path / file).write_bytes(raw)
    assert checkpoint.load(path, state) == {"extra": state["extra"]}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("file", FILES)
def test_parts_of_two_saves_are_never_loaded_together(file, verify, tmp_path):
    for run, number in (("a", 1.0), ("b", 2.0)):
        run_ranks(2, save_sharded, str(tmp_path / run), number)
    path = tmp_path / "a" / "step-1"
    shutil.copy(tmp_path / "b" / "step-1" / file, path / file)
    state = {"w": torch.full((2, 3), float("nan"))}
    said = error_of(lambda: checkpoint.load(path, state, verify=verify))
    named = [name for name in FILES if f"{name} is of another save" in said]
    assert named and (file == "manifest.json" or named == [file]), said
    assert state["w"].isnan().all()
    if verify:
        said = error_of(lambda: checkpoint.verify(path))
        assert [n for n in FILES if f"{n} is of another save" in said] == (
            FILES[:-1] if file == "manifest.json" else [file]
        )


def other_steps(directory):
    return error_of(lambda: checkpoint.save(directory, sharded(1.0), step=1 + dist.get_rank()))


def test_ranks_that_save_other_steps_are_told(tmp_path):
    for said in run_ranks(2, other_steps, str(tmp_path)):
        assert "[1, 2]" in said
    assert not list(tmp_path.iterdir())


def apart(directory):
    """Each rank has a directory of its own that it takes for a shared one."""
    write = saving._write

    def writes(made, *rest):
        mine = Path(f"{directory}-{dist.get_rank()}") / "x.tmp"
        mine.mkdir(parents=True)
        theirs = commit.Draft(mine.parent, 1, made.save)
        theirs.temporary = mine
        return write(theirs, *rest)

    saving._write = writes
    try:
        return error_of(lambda: save_sharded(directory, 1.0))
    finally:
        saving._write = write


def test_ranks_that_do_not_share_the_directory_are_told(tmp_path):
    for said in run_ranks(2, apart, str(tmp_path / "d")):
        assert "all ranks share" in said


OLDER = {"format": 1, "step": 1, "files": {"values.json": [2, "0"]}}


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda path: (path / "manifest.json").write_text(
            json.dumps({**OLDER, "sha256": manifest._digest_of(OLDER)}) + "\n"), "of format 1"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text(""), "manifest.json is damaged"),
        (lambda path: dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True), "not a complete checkpoint"),
        (lambda path: checkpoint.save(path.parent, {"w": torch.ones(2)}, step=5).wait().rename(path),
         "of step 5, not of the step"),
    ],
    ids=["older", "list", "deep", "empty", "dcp", "renamed"],
)  # fmt: skip
def test_what_is_no_checkpoint_of_ours_is_told(make, says, tmp_path):
    path = tmp_path / "step-1"
    path.mkdir()
    make(path)
    for use in (
        checkpoint.verify,
        checkpoint.contents,
        lambda path: checkpoint.load(path, {"w": torch.ones(2)}),
    ):
        assert says in error_of(lambda use=use: use(path))
    assert checkpoint.newest_good(tmp_path)[0] is None


def broken(module, name, rank):
    """Make a function of a module fail on one rank; returns what puts it back."""
    whole = getattr(module, name)

    def fails(*args, **kwargs):
        if dist.get_rank() == rank:
            raise OSError(5, "Input/output error")
        return whole(*args, **kwargs)

    setattr(module, name, fails)
    return lambda: setattr(module, name, whole)


def one_fails(directory, owner, name, rank, action, async_):
    place = {
        "saving": saving,
        "loading": loading,
        "commit": commit,
        "Draft": commit.Draft,
        "planner": saving.BoxSavePlanner,
    }[owner]
    state = sharded(2.0)
    mend = broken(place, name, rank)
    began = time.monotonic()
    try:
        if action == "save":
            said = error_of(lambda: checkpoint.save(directory, state, step=2, async_=async_).wait())
        else:
            said = error_of(lambda: checkpoint.load(directory, state))
    finally:
        mend()
    assert time.monotonic() - began < 20
    checkpoint.load(directory, state)
    assert (state["w"] == 1).all()
    checkpoint.save(directory, sharded(3.0), step=3)
    return said


@pytest.mark.parametrize(
    "owner, name, rank, action, async_",
    [
        ("saving", "as_boxes", 1, "save", False),
        ("planner", "create_local_plan", 1, "save", False),
        ("saving", "_staged", 1, "save", True),
        ("Draft", "begin", 0, "save", False),
        ("commit", "_sweep", 0, "save", True),
        ("saving", "_write", 1, "save", False),
        ("saving", "_write", 1, "save", True),
        ("saving", "seal", 0, "save", False),
        ("saving", "write_values", 0, "save", True),
        ("commit", "fsync", 0, "save", False),
        ("loading", "_resolve", 1, "load", False),
        ("loading", "_about", 1, "load", False),
        ("loading", "as_boxes", 1, "load", False),
        ("loading", "_fill", 1, "load", False),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_the_last_one_stays(
    owner, name, rank, action, async_, tmp_path
):
    run_ranks(2, save_sharded, str(tmp_path), 1.0)
    for said in run_ranks(2, one_fails, str(tmp_path), owner, name, rank, action, async_):
        assert f"rank {rank} could not {'write' if action == 'save' else 'read'}" in said
        assert "Input/output error" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def overlapping(directory):
    """Steps are saved in the background, none waited for before the next begins."""
    savings = [checkpoint.save(directory, sharded(n), step=n, keep_last=2, async_=True) for n in range(1, 5)]
    checkpoint.save(directory, sharded(5), step=5, keep_last=2)
    for saving_ in savings:
        saving_.wait()


def test_background_saves_of_several_ranks_may_overlap(tmp_path):
    run_ranks(2, overlapping, str(tmp_path))
    run_ranks(2, save_sharded, str(tmp_path), 6, step=6)
    left = checkpoint.steps(tmp_path)
    assert [path.name for path in left[-2:]] == ["step-5", "step-6"]
    for path in left:
        assert checkpoint.load(path, {"w": torch.zeros(2, 3)}) == {"value": int(path.name[5:])}


def one_dies(directory, rank):
    write = saving._write

    def dies(*args):
        if dist.get_rank() == rank:
            os.kill(os.getpid(), 9)
        return write(*args)

    saving._write = dies
    try:
        checkpoint.save(directory, sharded(2.0), step=2)
    finally:
        saving._write = write
        Path(directory, f"rank-{dist.get_rank()}-went-on").touch()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_does_not_hang_the_others(rank, tmp_path):
    run_ranks(2, save_sharded, str(tmp_path), 1.0)
    with pytest.raises(RankError):
        run_ranks(2, one_dies, str(tmp_path), rank, timeout=60)
    assert (tmp_path / f"rank-{1 - rank}-went-on").exists()
    run_ranks(2, save_sharded, str(tmp_path), 2.0, step=2)
    (tmp_path / f"rank-{1 - rank}-went-on").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    assert checkpoint.newest_good(tmp_path) == (tmp_path / "step-2", [])


def different_lists(directory):
    """A rank that does not see the newest step yet, as on a network file system."""
    steps = commit.steps
    if dist.get_rank() == 1:
        commit.steps = lambda path: steps(path)[:-1]
    try:
        good = checkpoint.newest_good(directory)[0]
        state = sharded(float("nan"))
        checkpoint.load(directory, state)
        return good, state["w"].tolist()
    finally:
        commit.steps = steps


def test_ranks_that_see_other_steps_take_those_of_rank_0(tmp_path):
    for step in (1, 2):
        run_ranks(2, save_sharded, str(tmp_path), float(step), step=step)
    assert run_ranks(2, different_lists, str(tmp_path)) == [(tmp_path / "step-2", [[2.0] * 3])] * 2


def test_a_checkpoint_says_who_saved_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first = checkpoint.verify(checkpoint.save(tmp_path, constant(1), step=1).wait())
    second = checkpoint.verify(checkpoint.save(tmp_path, constant(2), step=2).wait())
    assert first.job == "SLURM_JOB_ID=4711"
    assert first.save != second.save
    assert held(tmp_path) == 2
