"""A run goes on with the config it began with, unless somebody means a change; a refused start changes nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import cai

from cai_apps import applications, recipes
from cai_apps.config import file as config_file
from cai_apps.run.files import changes
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.testing import Ended

SMALL = {
    "train.steps": 2,
    "train.global_batch": 4,
    "train.microbatch_size": 2,
    "train.validate_every": 0,
    "data.limit_bytes": 50_000,
    "data.sequence_length": 16,
    "log.sample_tokens": 0,
    "parallel.shard": 1,
    "parallel.tensor.size": 1,
    "parallel.pipeline.size": 1,
}


def start(run: Path, values: dict, recipe: str = "llama-tiny") -> Ended:
    return cai(
        "train", recipe, *(f"--{key}={value}" for key, value in (values | {"log.directory": run}).items())
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps with a rate of its own."""
    place = tmp_path_factory.mktemp("run") / "run"
    values = SMALL | {"data.cache": place.parent / "cache", "optimizer.lr": 0.002}
    done = start(place, values)
    assert done.returncode == 0, done.stderr
    return place, values


def test_what_nobody_means_is_refused_and_changes_nothing(run):
    place, values = run
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    forgotten = {key: value for key, value in values.items() if key != "optimizer.lr"}
    done = start(place, forgotten | {"train.steps": 3})
    assert done.returncode == 2
    assert "optimizer.lr: 0.002 -> " in done.stderr and "train.steps" not in done.stderr
    assert f"cai train {place}/config.toml" in done.stderr
    another = start(place, {"parallel.shard": 1}, recipe="gpt2-tiny")
    assert another.returncode == 2 and "model." in another.stderr
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_what_is_meant_is_shown_and_kept(run):
    place, values = run
    done = start(place, values | {"train.steps": 3, "optimizer.lr": 0.001, "parallel.zero": 0})
    assert done.returncode == 0, done.stderr
    told = done.stdout[done.stdout.index("the run goes on, changed:\n") :].splitlines()[1:6]
    assert told == [
        "  lr_schedule.decay_steps: 2 -> 3",
        "  lr_schedule.warmup_steps: 2 -> 3",
        "  optimizer.lr: 0.002 -> 0.001",
        "  parallel.zero: 1 -> 0",
        "  train.steps: 2 -> 3",
    ]
    assert "resumed from" in done.stdout
    again = cai("train", place / "config.toml")
    assert again.returncode == 0 and "changed" not in again.stdout


@pytest.mark.parametrize("recipe", ["llama-tiny", "gpt2-tiny", "sd-v1-tiny", "sd3-tiny", "alphafold-tiny"])
def test_another_layout_is_no_change_of_what_is_learned(recipe, tmp_path):
    config = recipes.load(recipe, {"train.device": "cpu"})
    task = task_of(config)
    one, two = (task.resolve(laid_out(config, ranks), ranks) for ranks in (1, 2))
    directory = RunDirectory(tmp_path)
    directory.record(one)
    found = changes.changes(directory.config_file, two)
    assert found
    changes.check(found, tmp_path, frozenset())


@pytest.mark.parametrize("before", ["auto", "whole", "split", None])
@pytest.mark.parametrize("after", [{"parallel.zero": 3}, {"precision.master": "whole"}, {}])
def test_how_master_weights_are_kept_is_no_change(before, after, tmp_path):
    """None: of a run that knew no halves."""
    config = recipes.load(
        "llama-tiny", {"precision.compute": "bf16"} | ({"precision.master": before} if before else {})
    )
    directory = RunDirectory(tmp_path)
    directory.record(config)
    if before is None:
        directory.config_file.write_text(directory.config_file.read_text().replace('master = "auto"\n', ""))
    found = changes.changes(directory.config_file, config_file.change(config, after))
    changes.check(found, tmp_path, frozenset())


@pytest.mark.parametrize(
    "key", ["parallel.pipeline.wire", "parallel.wire_weights", "parallel.wire_gradients"]
)
def test_what_rounds_on_its_way_is_a_change(key, tmp_path):
    found = {key: ("full", "fp8"), "parallel.pipeline.size": (1, 2)}
    with pytest.raises(ConfigError, match=key):
        changes.check(found, tmp_path, frozenset())
    changes.check(found, tmp_path, frozenset({key}))


def laid_out(config, ranks):
    parallel = config.parallel
    tensor, pipeline = replace(parallel.tensor, size=1), replace(parallel.pipeline, size=1)
    return replace(config, parallel=replace(parallel, shard=ranks, tensor=tensor, pipeline=pipeline))


def task_of(config):
    if applications.of(config).name == "language":
        from cai_apps.applications.language.task import LANGUAGE as task
    elif applications.of(config).name == "diffusion":
        from cai_apps.applications.diffusion.task import DIFFUSION as task
    else:
        from cai_apps.applications.protein.task import PROTEIN as task
    return task


def test_keys_that_an_older_version_did_not_write_count_as_their_defaults(tmp_path):
    config = recipes.load("llama-tiny", {"optimizer.lr": 0.5})
    directory = RunDirectory(tmp_path)
    directory.record(config)
    text = directory.config_file.read_text()
    directory.config_file.write_text(text.replace("lr = 0.5\n", ""))
    assert changes.changes(directory.config_file, config) == {"optimizer.lr": (0.0003, 0.5)}


def test_two_runs_in_one_directory(tmp_path):
    holder = "from cai_apps.run.files.directory import RunDirectory; import sys; from pathlib import Path\n"
    holder += "with RunDirectory(Path(sys.argv[1])).held(): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        expected = pytest.raises(CheckpointError, match=rf"(?s)is training there.*process {other.pid}")
        with expected, RunDirectory(tmp_path / "run").held():
            pass
        other.kill()
    with RunDirectory(tmp_path / "run").held():  # what the dead held is taken over
        pass
    assert not (tmp_path / "run").exists()  # nothing was put there


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    expected = pytest.raises(ConfigError, match="nothing can be written")
    with expected, RunDirectory(tmp_path / "file" / "run").held():
        pass


def test_a_crash_that_cannot_be_written_is_kept_elsewhere(tmp_path, capsys):
    directory = RunDirectory(tmp_path / "run")
    directory.crash.parent.mkdir()
    directory.crash.write_text("a file where the directory should be")
    directory.record_crash(3, ValueError("the cause"))
    told = capsys.readouterr().err
    elsewhere = Path(told.split()[-1])
    assert "rank 3" in told and "ValueError: the cause" in elsewhere.read_text()
    elsewhere.unlink()
