"""Averages of weights are those of plain weights, and go from one stage's checkpoint to another's."""

from __future__ import annotations

import pytest
import torch
import toy

from cai_mesh import checkpoint
from cai_mesh.testing import run_ranks
from cai_zero import Ema

DECAY = 0.75


def make(model, mesh):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def averaged(stage, shape, steps=4):
    model, optimizer, mesh = toy.built(make, stage, shape)
    ema = Ema(model, optimizer, decay=DECAY)
    for step in range(steps):
        toy.advance(model, optimizer, mesh, [step])
        ema.update()
    return model, optimizer, ema


def saved(stage, shape, directory):
    ema = averaged(stage, shape)[2]
    checkpoint.save(directory, dict(ema.state_for_checkpoint()), step=1).wait()


def loaded(stage, shape, directory):
    model, optimizer, _ = toy.built(make, stage, shape)
    ema = Ema(model, optimizer, decay=DECAY)
    checkpoint.load(directory, dict(ema.state_for_checkpoint()))
    before = toy.full_parameters(model)
    with ema.applied():
        inside = toy.full_parameters(model)
    return inside, before, toy.full_parameters(model)


@pytest.mark.parametrize(("first", "second"), [(0, 3), (1, 2), (3, 1)])
def test_an_average_goes_from_stage_to_stage(first, second, tmp_path):
    plain = toy.Toy()
    optimizer, averages = make(plain, None), {n: p.detach().clone() for n, p in plain.named_parameters()}
    for step in range(4):
        toy.advance(plain, optimizer, None, [step])
        for name, param in plain.named_parameters():
            averages[name].lerp_(param.detach(), 1 - DECAY)
    run_ranks(2, saved, first, (2,), tmp_path)
    for inside, before, after in run_ranks(3, loaded, second, (3,), tmp_path):
        for name, value in averages.items():
            torch.testing.assert_close(inside[name], value, rtol=0, atol=1e-12)
            assert torch.equal(before[name], after[name])
