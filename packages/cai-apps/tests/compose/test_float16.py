"""float16 with a scaled loss: steps that overflow are left out on all ranks, the others are those of a plain loop."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from layouts import (
    BATCH,
    Case,
    adamw,
    batch,
    full,
    microbatches_of,
    model_config,
    parameters_of,
    rate,
    run_config,
)
from torch import nn

from cai_apps import recipes
from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import initializer, meta_model
from cai_apps.config.validation import resolve
from cai_mesh import checkpoint
from cai_mesh.comm import all_reduce, group
from cai_mesh.errors import ConfigError
from cai_mesh.testing import run_ranks

STEPS = 6
FIRST = 2.0**24
"""A first scale under which float16 gradients overflow, so that some steps are left out."""
LAYOUTS = {
    "one": Case(),
    "data2-zero1": Case(data=2, zero=1),
    "data2-zero3": Case(data=2, zero=3),
    "data2-pipeline2-zero2": Case(data=2, pipeline=2, zero=2),
    "tensor2": Case(tensor=2),
}


def plain_loop():
    """Losses, which steps were left out, and parameters: float32 masters, float16 copies, the scale by hand."""
    cpu = torch.device("cpu")
    master = materialize(
        meta_model(model_config("llama")), initializer, seed=7, dtype=torch.float32, device=cpu
    )
    for param in master.parameters():
        param.requires_grad_()
    optimizer, scale, losses, left_out = adamw(master), FIRST, [], []
    for step in range(STEPS):
        ids, labels = batch(step)
        total, loss = int((labels[:, 1:] != -100).sum()), 0.0
        for i, t in zip(ids.split(2), labels.split(2), strict=True):
            half = copy.deepcopy(master).half()
            logits = half(input_ids=i, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            part = nn.functional.cross_entropy(logits, t[:, 1:].flatten(), reduction="sum") / total
            (part * scale).backward()
            loss += part.item()
            for own, copied in zip(master.parameters(), half.parameters(), strict=True):
                found = copied.grad.float() / scale
                own.grad = found if own.grad is None else own.grad + found
        norm = float(nn.utils.clip_grad_norm_(master.parameters(), 1.0))
        left_out.append(not math.isfinite(norm))
        if left_out[-1]:
            scale /= 2
        else:
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, left_out, dict(master.named_parameters())


def session_of(case):
    config = run_config(case, "fp32", STEPS)
    config = replace(config, precision=replace(config.precision, compute="fp16"))
    config = replace(config, train=replace(config.train, microbatch_size=BATCH // (case.data * 4)))
    return apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))


def advance(session, case, steps):
    losses, left_out = [], []
    for step in steps:
        batches, total = microbatches_of(session, case, step)
        loss = session.step(batches, total=total).clone()
        norm = float(session.norm())
        left_out.append(not math.isfinite(norm))
        session.update(rate(step), norm)
        all_reduce(loss, group(session.mesh, ("dp_replicate", "dp_shard")))
        losses.append(float(loss))
    return losses, left_out


def trained(case):
    session = session_of(case)
    session.scale.load_state_dict({"scale": FIRST, "good_steps": 0, "skipped": 0})
    losses, left_out = advance(session, case, range(STEPS))
    return losses, left_out, session.scale.skipped, full(parameters_of(session))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_a_plain_loop_does(layout):
    losses, expected, params = plain_loop()
    assert True in expected and False in expected
    for found, left_out, skipped, weights in run_ranks(LAYOUTS[layout].world, trained, LAYOUTS[layout]):
        assert left_out == expected and skipped == sum(expected)
        assert found == pytest.approx(losses, rel=2e-3)
        # chunks take weight gradients in float32, the plain loop rounds them first: Adam makes a whole step of the last
        # bits of a gradient that is nearly zero, so a few elements move elsewhere
        apart = [(weights[name].float() - value.detach()).abs().flatten() for name, value in params.items()]
        assert (torch.cat(apart) > 3e-3).float().mean() < 2e-3


def saved(case, place, first):
    session = session_of(case)
    if not first:
        session.loaded(checkpoint.load(place, session.state()), 3)
        return session.scale.state_dict()
    session.scale.load_state_dict({"scale": 512.0, "good_steps": 0, "skipped": 0})
    advance(session, case, range(3))
    checkpoint.save(place.parent, session.state(), step=3)
    return session.scale.state_dict()


def test_the_scale_goes_on_from_a_checkpoint(tmp_path):
    place = tmp_path / "step-3"
    before = run_ranks(2, saved, LAYOUTS["data2-zero3"], place, True)[0]
    assert before["good_steps"] == 3
    assert run_ranks(1, saved, LAYOUTS["one"], place, False) == [before]


def test_what_float16_cannot_go_with_is_refused():
    config = recipes.load(
        "llama-1b", {"parallel.shard": 1, "precision.compute": "fp16", "memory.residency": "host"}
    )
    with pytest.raises(ConfigError, match="looks for overflow"):
        resolve(config, 1)
