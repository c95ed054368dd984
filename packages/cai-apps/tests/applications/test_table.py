"""The table of applications, and one of another kind through all of the house: config, ranks, loop, plan, report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy_images

from cai_apps import applications, recipes
from cai_apps.cli import main
from cai_apps.compose.materialize import materialize
from cai_apps.data.batches import Batches
from cai_apps.run.loop.learning_rate import learning_rate
from cai_mesh.errors import ConfigError

STEPS = 8
TEXT = """
application = "images"
samples = 64
[parallel]
shard = {shard}
zero = {zero}
pipeline = {{ size = {stages} }}
[optimizer]
lr = 0.01
[train]
steps = {steps}
global_batch = 16
microbatch_size = {microbatch}
device = "cpu"
validate_every = 4
validation_batches = 1
[checkpoint]
every = 4
[log]
directory = "{directory}"
"""


@pytest.fixture
def images(monkeypatch):
    monkeypatch.setitem(applications.TABLE, "images", "toy_images")


def write(tmp_path: Path, name: str, **values) -> str:
    """A config file of a layout."""
    known = {
        "shard": 1,
        "zero": 1,
        "stages": 1,
        "steps": STEPS,
        "microbatch": 4,
        "directory": tmp_path / name,
    }
    path = tmp_path / f"{name}.toml"
    path.write_text(TEXT.format(**known | values))
    return str(path)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def plain_loop(config) -> tuple[list[float], list[float]]:
    """Losses and norms of one process without anything of ours but data, rates and initial values."""
    with torch.device("meta"):
        model = toy_images.Classifier(config.model.width, config.model.layers)
    materialize(
        model, lambda model: toy_images.initialize, seed=0, dtype=torch.float32, device=torch.device("cpu")
    )
    for param in model.parameters():
        param.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    batches, losses, norms = Batches(toy_images.Squares(0, 64), 16, 16, 0, 1, seed=0), [], []
    schedule = replace(config.lr_schedule, decay_steps=STEPS, warmup_steps=STEPS)
    for step in range(STEPS):
        (batch,) = batches.at(16 * step)
        loss = torch.nn.functional.cross_entropy(model(batch["pixels"]), batch["quarter"])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.param_groups[0]["lr"] = learning_rate(step, 0.01, schedule)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


LAYOUTS = {
    "one": {"stages": 1},
    "zero3-x-pp2": {"shard": 2, "zero": 3, "stages": 2, "microbatch": 2},
    "zero1-x-pp2": {"shard": 2, "zero": 1, "stages": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_train_as_a_plain_loop_does(images, tmp_path, layout):
    file = write(tmp_path, layout, **LAYOUTS[layout])
    assert main(["train", file]) == 0
    found = records(tmp_path / layout)
    losses, norms = plain_loop(recipes.load(file))
    assert [r["loss"] for r in found] == pytest.approx(losses, rel=1e-5)
    assert [r["grad_norm"] for r in found] == pytest.approx(norms, rel=1e-4)
    assert found[-1]["images"] == 16 * STEPS and found[-1]["images_per_second"] > 0
    assert not any("token" in key for record in found for key in record)
    assert "validation_loss" in found[3]


def test_a_run_of_pictures_goes_on_and_is_planned_and_reported(images, tmp_path, capsys):
    file = write(tmp_path, "run", shard=2, zero=3, stages=2, microbatch=2)
    assert main(["plan", file]) == 0
    assert "16 pictures a step" in capsys.readouterr().out
    assert main(["train", file, "--train.steps", "4", "--lr_schedule.decay_steps", str(STEPS)]) == 0
    one = write(tmp_path, "again", directory=tmp_path / "run")
    assert main(["train", one]) == 0
    out = capsys.readouterr().out
    assert "resumed from" in out and "weights        " in out and "images/s" in out
    losses, _ = plain_loop(recipes.load(file))
    assert [r["loss"] for r in records(tmp_path / "run")] == pytest.approx(losses, rel=1e-5)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "images per second" in (tmp_path / "run" / "report.html").read_text()


def test_an_application_is_named_never_guessed(images, tmp_path, capsys):
    file = tmp_path / "x.toml"
    file.write_text('application = "imagse"\n')
    assert main(["train", str(file)]) == 2
    assert "did you mean 'images'?" in capsys.readouterr().err
    file.write_text("samples = 3\n")
    with pytest.raises(ConfigError, match="unknown config key 'samples'"):
        recipes.load(str(file))
