"""A run directory in which somebody has laid links, and what others may read of one."""

from __future__ import annotations

import os
import stat

import pytest

from cai_apps import applications, recipes
from cai_apps.applications.language.config import Config
from cai_apps.report.plots import draw_loss
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop.metrics import Records
from cai_apps.run.loop.training_loop import Loop
from cai_mesh.errors import ConfigError


@pytest.fixture
def other(tmp_path):
    (tmp_path / "other").write_text("theirs")
    return tmp_path / "other"


NAMES = (
    "config.toml",
    "metrics.jsonl",
    "checkpoints",
    "plots",
    "plots/loss.png",
    "crash",
    "crash/rank-0.txt",
)
NAMES += ("export", "pictures", "report.html", "tokenizer/tokenizer.json", "checkpoints/step-1")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", ["file", "directory", "nothing"])
def test_a_link_is_refused_before_anything_is_written(name, target, other, tmp_path):
    run = RunDirectory(tmp_path / "run")
    link = run.path / name
    link.parent.mkdir(parents=True)
    (tmp_path / "directory").mkdir()
    link.symlink_to(
        {"file": other, "directory": tmp_path / "directory", "nothing": tmp_path / "none"}[target]
    )
    with pytest.raises(ConfigError, match=r"is a symbolic link; nothing is written through one"):
        run.create(Config())
    assert other.read_text() == "theirs"
    assert not list((tmp_path / "directory").iterdir()) and not (tmp_path / "none").exists()
    assert not (run.path / "config.toml").exists() or name == "config.toml"


def test_a_link_laid_during_the_run_is_replaced_or_refused(other, tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(Config())
    (run.path / "metrics.jsonl").symlink_to(other)
    other.write_text("")
    Records(run.metrics).close()
    run.metrics.write_text('{"step": 1, "loss": 1.0}\n')
    for path in (run.crash / "rank-0.txt", run.plots / "loss.png"):
        path.symlink_to(other)
    run.record_crash(0, ValueError("boom"))
    draw_loss(run)
    assert other.read_text() == ""
    assert not [path for path in run.path.rglob("*") if path.is_symlink()]


OUTPUTS = {
    "llama-tiny": (
        "export",
        {"parallel.tensor.size": 1, "parallel.pipeline.size": 1, "parallel.pipeline.microbatches": None},
    ),
    "sd-v1-tiny": ("pictures", {"sampling.every": 1, "sampling.steps": 2, "train.validate_every": 0}),
    "alphafold-tiny": ("folds", {"folding.every": 1, "train.validate_every": 0, "train.microbatch_size": 1}),
}
"""A directory that is written late, and what to change of the recipe."""


@pytest.mark.parametrize(("recipe", "name", "changes"), [(r, *more) for r, more in OUTPUTS.items()])
def test_what_a_run_makes_late_takes_the_place_of_links(recipe, name, changes, tmp_path, monkeypatch):
    """Links that are laid when its first step begins."""
    theirs, run = tmp_path / "theirs", RunDirectory(tmp_path / "run")
    (theirs / "2").mkdir(parents=True)
    goes_on = Loop.run

    def run_behind_links(loop, position):
        for late in {"export", name}:
            (run.path / late).symlink_to(theirs)
        return goes_on(loop, position)

    monkeypatch.setattr(Loop, "run", run_behind_links)
    small = {
        "train.steps": 2,
        "train.global_batch": 2,
        "train.microbatch_size": 2,
        "train.device": "cpu",
        "parallel.shard": 1,
    }
    small |= {"log.directory": str(run.path), "lr_schedule.decay_steps": 200}
    config = recipes.load(recipe, small | changes)
    applications.of(config).train(config, recipe, ())
    assert [path for path in theirs.rglob("*") if path != theirs / "2"] == []
    assert not [path for path in run.path.rglob("*") if path.is_symlink()]
    assert any((run.path / name).iterdir()) and any(run.export.iterdir())


def test_the_run_directory_may_be_a_link_and_a_checkpoint_hold_one(other, tmp_path):
    (tmp_path / "far" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "far" / "checkpoints" / "step-1" / "data").symlink_to(other)
    (tmp_path / "run").symlink_to("far")
    RunDirectory(tmp_path / "run").create(Config())
    assert (tmp_path / "far" / "config.toml").is_file()


def test_others_cannot_read_what_may_hold_secrets(tmp_path):
    run, before = RunDirectory(tmp_path / "run"), os.umask(0)
    try:
        run.create(Config())
        run.record_crash(0, ValueError("with a token in it"))
        Records(run.metrics).close()
    finally:
        os.umask(before)
    files = [run.config_file, run.metrics, run.crash / "rank-0.txt"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 3
    folders = [run.path, run.checkpoints, run.plots, run.crash]
    assert not [path for path in folders if path.stat().st_mode & 0o022]
