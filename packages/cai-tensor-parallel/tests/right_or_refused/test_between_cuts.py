"""What lies between a column cut and a row cut: right, or refused by name, with a trial and without."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cut_cases import MODELS, PLAN, build, inputs, loss
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cai_mesh.errors import PlanError
from cai_mesh.layout import layout_of
from cai_mesh.testing import run_ranks
from cai_mesh.trial import Trial
from cai_tensor_parallel import Plan, parallelize

RIGHT_ALWAYS = {"gelu", "no dropout"}
RIGHT_WITH_A_TRIAL = {*RIGHT_ALWAYS, "prelu", "scale of all"}
SEEN_BY_GRADIENTS = {
    "prelu": "between.weight",
    "scale of all": "between.scale",
    "gate of whole x": "gate.weight",
}
SEEN_BY_LAYERS = {
    "adapter": "up cannot be cut",
    **dict.fromkeys(["weight norm", "spectral norm"], "up cannot be cut"),
    **dict.fromkeys(["weight norm of hooks", "spectral norm of hooks"], "up cannot be cut"),
    "forward of its own": "up cannot be cut",
}
CUT_TWICE = Plan({"up": "colwise_gather_output", "down": "rowwise_split_input"})


def difference(model: nn.Module, whole: nn.Module) -> float:
    """The largest, of the loss and all gradients, relative to the largest value of each."""
    got, expected = loss(model(**inputs())), loss(whole(**inputs()))
    got.backward()
    expected.backward()
    largest = float(((got - expected) / expected).detach().abs())
    parameters = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = parameters[name].grad
        for here, box in layout_of(parameter).slices():
            off = (parameter.grad[here] - wanted[box.slices()]).abs().max() / wanted.abs().max()
            largest = max(largest, float(off))
    return largest


def outcome(name: str, tried: bool, plan: Plan = PLAN) -> str | float:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    trial = Trial(partial(build, name), inputs, loss) if tried else None
    try:
        model = parallelize(build(name), mesh, plan, trial=trial)
        return difference(model, build(name))
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("name", list(MODELS))
def test_with_a_trial_it_is_right_or_refused(name):
    for got in run_ranks(2, outcome, name, True):
        if name in RIGHT_WITH_A_TRIAL:
            assert got < 1e-12
        else:
            assert isinstance(got, str)
            assert SEEN_BY_LAYERS.get(name, "") in got


@pytest.mark.parametrize("name", [*RIGHT_ALWAYS, *SEEN_BY_GRADIENTS, *SEEN_BY_LAYERS])
def test_without_a_trial_gradients_are_looked_after(name):
    for got in run_ranks(2, outcome, name, False):
        if name in RIGHT_ALWAYS:
            assert got < 1e-12
        else:
            assert (SEEN_BY_GRADIENTS | SEEN_BY_LAYERS)[name] in got


@pytest.mark.parametrize("name", ["softmax", "normalize", "top-k", "layer norm", "gate of whole x"])
def test_what_mixes_features_is_right_between_whole_ones(name):
    for got in run_ranks(2, outcome, name, True, CUT_TWICE):
        assert got < 1e-12


def apertus():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("apertus", **sizes, num_key_value_heads=2, vocab_size=96)
    model = AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    return model


def learnable_activations():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(1))
    whole, model = apertus(), parallelize(apertus(), mesh)
    for each in (whole, model):
        each(input_ids=ids, labels=ids).loss.backward()
    wanted = dict(whole.named_parameters())
    names = [name for name in wanted if "act_fn" in name]
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    return max(float((got[n] - wanted[n].grad).abs() / wanted[n].grad.abs()) for n in names)


def test_gradients_of_a_learnable_activation_are_summed():
    assert max(run_ranks(2, learnable_activations)) < 1e-4


def grown():
    """A model of transformers that was changed after it was made: the small one of its config is changed alike."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=96)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config).double()
    whole.model.layers[0].mlp.act_fn = nn.PReLU().double()
    model = parallelize(copy.deepcopy(whole), mesh)
    ids = torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(1))
    for each in (whole, model):
        each(input_ids=ids, labels=ids).loss.backward()
    got, wanted = (each.model.layers[0].mlp.act_fn.weight.grad for each in (model, whole))
    return float((got - wanted).abs() / wanted.abs())


def test_a_changed_model_is_looked_after():
    assert max(run_ranks(2, grown)) < 1e-9
