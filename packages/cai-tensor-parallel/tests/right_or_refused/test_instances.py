"""What an instance has and its class does not is cut right, or refused by name."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from cai_mesh.errors import CaiError
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import parallelize

IDS = torch.arange(24).reshape(2, 12)


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4)).double().eval()


class Mixing(nn.Module):
    """An activation over features (as maxout and GLU variants are), which a rank has some of."""

    def forward(self, x):
        return torch.softmax(x, -1) * x


class Scaled(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x) * 1.5


class OwnNorm(type(llama().model.norm)):
    """A norm of the same parameters, as kernels' libraries put in."""

    def forward(self, x):
        return super().forward(x) * 2


class Narrow(nn.Module):
    """Another layer altogether."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(48, 5), nn.Linear(5, 32)

    def forward(self, x):
        return self.up(self.down(x))


def layers(model):
    return model.model.layers


def mixing(model):
    layers(model)[1].mlp.act_fn = Mixing()


def mixing_by_hook(model):
    layers(model)[0].mlp.act_fn.register_forward_hook(
        lambda _, args, out: out / (1 + out.norm(dim=-1, keepdim=True))
    )


def mixing_before(model):
    layers(model)[0].mlp.down_proj.register_forward_pre_hook(
        lambda _, args: (args[0] - args[0].mean(-1, True),)
    )


def mixing_forward(model):
    def forward(self, x):
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y / (1e-3 + y.std(-1, keepdim=True)))

    mlp = layers(model)[0].mlp
    mlp.forward = types.MethodType(forward, mlp)


def mixed_tokens(model):
    layers(model)[0].register_forward_hook(lambda _, args, out: out + out.mean(1, keepdim=True))


def mixed_tokens_of_norms(model):
    layers(model)[1].input_layernorm.register_forward_hook(
        lambda _, args, out: out - out.mean(1, keepdim=True)
    )


def scaled(model):
    layers(model)[1].mlp.act_fn = Scaled()


def scaled_by_hook(model):
    layers(model)[0].mlp.register_forward_hook(lambda _, args, out: out * 0.5)


def observed(model):
    model.seen = []
    layers(model)[0].register_forward_hook(lambda _, args, out: model.seen.append(out.detach()) or None)


def bound_forward(model):
    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

    for layer in layers(model):
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


def kernels_of_a_library(model):
    """As Liger puts its kernels into an instance: a forward, and attributes that it reads."""

    def forward(self, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * (x * scale) if self.casting_mode == "llama" else x

    for layer in layers(model):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.offset, norm.casting_mode, norm.in_place = 0.5, "llama", True
            norm.forward = types.MethodType(forward, norm)


def own_norms(model):
    for layer in layers(model):
        norm = OwnNorm(32).double()
        norm.load_state_dict(layer.input_layernorm.state_dict())
        layer.input_layernorm = norm


def another_scale(model):
    layers(model)[0].self_attn.scaling = 0.1


def inputs_require_gradients(model):
    model.enable_input_require_grads()


def narrow(model):
    layers(model)[0].mlp.down_proj = Narrow().double()


def an_unused_head(model):
    model.score = nn.Linear(32, 3).double()


CHANGES = {
    "an activation that mixes features": mixing,
    "a hook that mixes features": mixing_by_hook,
    "a hook before the row cut": mixing_before,
    "a forward that mixes features": mixing_forward,
    "a hook that mixes tokens": mixed_tokens,
    "a hook on a norm that mixes tokens": mixed_tokens_of_norms,
    "another activation": scaled,
    "a hook that scales": scaled_by_hook,
    "a hook that observes": observed,
    "a bound forward": bound_forward,
    "norms of another class": own_norms,
    "kernels of a library": kernels_of_a_library,
    "another scale": another_scale,
    "inputs that require gradients": inputs_require_gradients,
    "another layer": narrow,
    "an unused head": an_unused_head,
}
REFUSED = {
    "an activation that mixes features": "layers.1.mlp.act_fn",
    "a hook that mixes features": "hooks on model.layers.0.mlp.act_fn",
    "a hook before the row cut": "hooks on model.layers.0.mlp.down_proj",
    "a forward that mixes features": "forward of model.layers.0.mlp",
    "another layer": "layers.0.mlp.down_proj",
}
WITH_SEQUENCES = {
    "a hook that mixes tokens": "hooks on model.layers.0",
    "a hook on a norm that mixes tokens": "hooks on model.layers.1.input_layernorm",
}


def off(model, whole):
    """The largest difference of loss and logits."""
    whole_out, out = whole(input_ids=IDS, labels=IDS), model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return float((out.logits - whole_out.logits).abs().max() + (out.loss - whole_out.loss).abs())


def outcomes(sequence):
    """How far each changed model is from itself whole; or what the error says."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {}
    for name, change in CHANGES.items():
        model = llama()
        change(model)
        whole = copy.deepcopy(model)
        try:
            found[name] = off(parallelize(model, mesh, sequence=sequence), whole)
        except CaiError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def found():
    return {sequence: run_ranks(2, outcomes, sequence) for sequence in (False, True)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_changed_instance_is_right_or_refused_by_name(sequence, change, found):
    refused = REFUSED | WITH_SEQUENCES if sequence else REFUSED
    for outcome in (result[change] for result in found[sequence]):
        if change in refused:
            assert refused[change] in str(outcome)
        else:
            assert isinstance(outcome, float) and outcome < 1e-9, outcome
