"""Kernels compute experts: kinds of transformers are known by what they compute, spread or not, and others say so."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from layouts import Case, trained, twin
from torch import nn

from cai_apps import recipes
from cai_apps.applications.language.plan import plan
from cai_apps.compose.expert_maths import expert_maths, report_experts
from cai_kernels.swap import swap
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_mesh.trial import shrunk
from cai_tensor_parallel import own_forward

STEPS = 3
"""Steps of each run."""

KERNELS = {
    "mixtral": "silu",
    "qwen3_moe": "silu",
    "olmoe": "silu",
    "deepseek_v3": "silu",
    "aria_text": "silu",
    "gpt_oss": "clamped",
    "nemotron_h": "act_fn",
}
"""Types, and what their experts were found to compute."""

expected = functools.cache(twin)


def trained_each(models, case):
    return {model: trained(model, case, "fp64", STEPS) for model in models}


CASES = {
    "one": Case(kernels="on"),
    "tensor2": Case(tensor=2, kernels="on"),
    "data2-zero3": Case(data=2, zero=3, recompute="selective", kernels="on"),
    "one-compiled": Case(kernels="on", compile="on"),
}


@pytest.mark.parametrize("layout", list(CASES))
def test_whole_layers_by_kernels_train_as_the_plain_loop(layout):
    case = CASES[layout]
    for model, got in run_ranks(case.world, trained_each, ("qwen3_moe", "mixtral"), case, timeout=240)[
        0
    ].items():
        losses, gradients, _ = expected(model, "fp64", STEPS)
        assert got[0] == pytest.approx(losses, rel=1e-5)  # kernels and norms multiply in another order
        assert_same_as_one_device(got[1], gradients, tolerance=1e-5)


def small(name):
    """A small model of a type on the CPU in float64, as transformers builds it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, num_hidden_layers=4))
    return shrunk(model, labelled=False).build().double()


def results(model):
    ids = torch.arange(24).view(2, 12) % 16
    logits = model(input_ids=ids, use_cache=False).logits
    named = dict(model.named_parameters())
    loss = (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return {"logits": logits.detach(), **dict(zip(named, gradients, strict=True))}


@pytest.mark.parametrize("name", list(KERNELS))
def test_kinds_of_transformers_compute_the_same_by_kernels(name):
    model = small(name)
    wanted = results(model)
    swapped = swap(model, kinds=["experts"])
    assert {entry.kernel for entry in swapped.replaced} == {f"expert_layer({KERNELS[name]})"}
    assert not swapped.kept
    for key, value in results(model).items():
        scale = (
            wanted[key].abs().max()
        )  # some types compute parts in float32, which CPUs round each in its own way
        assert (value - wanted[key]).abs().max() <= 3e-6 * scale, key


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_plan_counts_what_kernels_keep(compiled):
    def activations(kernels):
        changes = {"train.kernels": kernels, "train.compile": compiled, "memory.recompute": "none"}
        return plan(recipes.load("mixtral-tiny", changes), ranks=4).stages[0].activations

    assert activations("on") < 0.8 * activations("off")


class Half(nn.Module):
    """A layer that halves what experts make: no kernel knows it."""

    def __init__(self):
        super().__init__()
        self.num_experts = 2
        self.up, self.down = nn.Parameter(torch.ones(2, 6, 4)), nn.Parameter(torch.ones(2, 4, 3))

    def forward(self, tokens, ids, weights):
        return tokens * weights.sum(1, keepdim=True) * self.up.mean() * self.down.mean() / 2


def maths_of(kinds):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        maths = expert_maths(nn.ModuleList([Half()]), kinds)
        report_experts(swap(nn.ModuleList([Half()]), kinds=kinds))
    return maths is own_forward, [str(warning.message) for warning in caught]


def test_what_runs_no_kernels_says_so_on_the_first_rank():
    assert run_ranks(2, maths_of, ("norm",)) == [(True, [])] * 2
    (_, first), (_, second) = run_ranks(2, maths_of, ("experts",))
    assert len(first) == 2 and all("by their own forward in 0: it computes" in text for text in first)
    assert not second
