"""When a run ends early, as the callback of transformers decides on the same losses; and which checkpoint is best."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cai_apps.applications.language.config import Config
from cai_apps.config.held_out import check_validates
from cai_apps.config.sections import Checkpoint, EarlyStopping
from cai_apps.run.files import checkpoint
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Position
from cai_apps.run.files.standing import Standing
from cai_mesh import checkpoint as files
from cai_mesh.errors import ConfigError


def published(losses, patience, threshold):
    """The number of validations after which transformers' callback stops; None: it does not."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

    callback = EarlyStoppingCallback(patience, threshold)
    state, control = TrainerState(), TrainerControl()
    arguments: Any = SimpleNamespace(
        metric_for_best_model="loss",
        greater_is_better=False,
        load_best_model_at_end=True,
        eval_strategy="steps",
    )
    assert TrainingArguments is not None
    for number, loss in enumerate(losses, start=1):
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # as Trainer does after its callbacks
            state.best_metric = loss
        if control.should_training_stop:
            return number
    return None


def ours(losses, patience, threshold):
    standing, options = Standing(), EarlyStopping(patience, threshold)
    for number, loss in enumerate(losses, start=1):
        standing = standing.after(number, loss, options)
        if standing.ends(options):
            return number
    return None


@pytest.mark.parametrize("threshold", [0.0, 0.05])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_ends_where_transformers_ends(patience, threshold):
    draw = random.Random(0)
    ends = set()
    for _ in range(60):
        losses = [3.0]
        for _ in range(24):
            losses.append(losses[-1] + draw.choice((-0.1, -0.04, 0.0, 0.04, 0.1)))
        ends.add(published(losses, patience, threshold))
        assert ours(losses, patience, threshold) == published(losses, patience, threshold)
    assert len(ends) > 3


def test_a_loss_that_is_no_number_is_no_improvement():
    options = EarlyStopping(2)
    standing = Standing().after(1, math.nan, options)
    assert standing == Standing(None, 0, 1)
    assert standing.after(2, 2.0, options) == Standing(2.0, 2, 0)
    assert Standing(2.0, 2, 0).after(3, math.nan, options) == Standing(2.0, 2, 1)
    assert "no validation loss is a number" in Standing().after(1, math.nan, options).reason(1, 9, options)


@pytest.mark.parametrize(
    "option", [{"checkpoint": Checkpoint(best=True)}, {"early_stopping": EarlyStopping(1)}]
)
def test_what_waits_for_validations_needs_some(option):
    config = replace(Config(), **option)
    with pytest.raises(ConfigError, match="nothing is validated"):
        check_validates(config)
    check_validates(replace(config, train=replace(config.train, validate_every=5)))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_best_checkpoint_stays_and_is_one(one_rank, tmp_path):
    config = replace(Config(), checkpoint=Checkpoint(best=True, keep_last=2))
    weight = torch.zeros(3)
    session: Any = SimpleNamespace(config=config, state=lambda: {"model.a": weight})
    (tmp_path / "checkpoints").mkdir()
    run = RunDirectory(tmp_path)
    saver = checkpoint.Saver(session, run, Origin({}, "tokens", ""))
    standing = Standing()
    for step, loss in enumerate((3.0, 2.0, 2.5, 2.2, 1.9, 2.0, 2.1, 2.2), start=1):
        weight.fill_(step)
        standing = standing.after(step, loss, config.early_stopping)
        position = Position(step, step, step, standing)
        saver.save(position)
        if standing.step == step:
            saver.save_best(position)
        assert [path.name for path in files.steps(run.best)] == [f"step-{standing.step}"]
    assert [path.name for path in files.steps(run.checkpoints)] == ["step-7", "step-8"]
    loaded = torch.zeros(3)
    values = files.load(run.best / "step-5", {"model.a": loaded})
    assert loaded.tolist() == [5.0] * 3
    assert Position.of_value(values["train"]) == Position(5, 5, 5, Standing(1.9, 5, 0))
    saver.save_best(
        Position(5, 5, 5, Standing(1.8, 5, 0))
    )  # the same step of a run that went on from before it
    assert [path.name for path in files.steps(run.best)] == ["step-5"]
