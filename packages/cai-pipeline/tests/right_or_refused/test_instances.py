"""A model with something beside its class is split right, or refused by name."""

from __future__ import annotations

import types

import pytest
import torch
from odd_llamas import build
from pipeline_families import sum_tied_gradients, token_ids
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.errors import CheckpointError, PlanError
from cai_mesh.layout import canonical_name
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, split


def width(model):
    return model.config.hidden_size


def head(model):
    model.score = nn.Linear(width(model), 3).double()


def parameter(model):
    model.gain = nn.Parameter(torch.ones(3))


def module_inside(model):
    model.model.adapter = nn.Linear(4, 4)


def tied_head(model):
    model.score = nn.Linear(width(model), 5, bias=False)
    model.score.weight = model.model.embed_tokens.weight


def layer_again(model):
    model.first = model.model.layers[0]


def buffer(model):
    model.register_buffer("steps", torch.ones(3))


def without_parameters(model):
    model.dropout = nn.Dropout(0.5)


class Bend(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2


def activation(model):
    model.model.layers[1].mlp.act_fn = Bend()


def token_hook(model):
    model.model.layers[2].register_forward_hook(lambda _, args, out: out + out.mean(1, keepdim=True))


def own_forward(model):
    def forward(self, x):
        return self.down_proj(torch.tanh(self.up_proj(x)))

    model.model.layers[0].mlp.forward = types.MethodType(forward, model.model.layers[0].mlp)


CHANGES = {
    "a head": head,
    "a parameter": parameter,
    "a module inside": module_inside,
    "a tied head": tied_head,
    "a layer again": layer_again,
    "a buffer": buffer,
    "a module without parameters": without_parameters,
    "an activation": activation,
    "a hook over tokens": token_hook,
    "a forward of its own": own_forward,
}
REFUSED = {
    "a head": "no stage has score.weight",
    "a parameter": "no stage has gain",
    "a module inside": "no stage has model.adapter.weight",
    "a tied head": "no stage has score.weight",
    "a layer again": "no stage has first.",
}


def outcomes():
    """What each refusal says; the largest difference of loss and gradients of the others."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), {}
    inputs = {"input_ids": token_ids(1), "labels": token_ids(2)}
    for name, change in CHANGES.items():
        model, whole = build("llama", 4), build("llama", 4)
        change(model)
        change(whole)
        try:
            split(model, mesh)
        except PlanError as error:
            found[name] = str(error)
            continue
        with pytest.raises(CheckpointError, match="the stages of one rank"):
            model.save_pretrained("nowhere")
        with pytest.raises(CheckpointError, match="the stages of one rank"):
            model.save_pretrained("nowhere", state_dict=model.state_dict())
        runner = PipelineRunner(model, mesh, microbatches=1, loss_fn=lambda output, _: output.loss)
        got = runner.step([inputs], [None])
        sum_tied_gradients(model)
        expected = whole(**inputs).loss
        expected.backward()
        wanted = {n: p.grad for n, p in whole.named_parameters()}
        grads = {canonical_name(n, p): p.grad for n, p in model.named_parameters() if p.grad is not None}
        off = [float((grad - wanted[n]).abs().max()) for n, grad in grads.items()]
        found[name] = max(abs(float(got) - float(expected.detach())), *off)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, outcomes)


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_split_right_or_refused_by_name(change, ranks):
    for found in ranks:
        if change in REFUSED:
            assert REFUSED[change] in found[change]
        else:
            assert found[change] < 1e-9
