"""Layers that read the same tensor sum its gradient once; whatever else a module reads is summed by itself."""

from __future__ import annotations

import copy
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from cai_mesh.layout import layout_of
from cai_mesh.testing import run_ranks
from cai_mesh.trial import Trial
from cai_tensor_parallel import Plan, parallelize

PLAN = dict.fromkeys(("*.q", "*.k", "*.v", "*.gate"), "colwise") | {"*.o": "rowwise"}


class Mixer(nn.Module):
    """Queries of one tensor; keys and values of another, of the same, or of what has been made of it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.q, self.k, self.v, self.gate = (nn.Linear(8, 12) for _ in range(4))
        self.o = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        read = {"same": x, "other": other, "made": x.tanh(), "half": x, "unused": x}[self.form]
        q, k, v = self.q(x), self.k(read), self.v(read)
        if self.form == "unused":
            k = k.detach()
        gate = self.gate(other if self.form == "half" else x)
        made = q.sigmoid() * k + v * gate
        if self.form == "made":
            made = made + self.q(x)  # again, after other tensors were read
        return self.o(made)


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm, self.mixer, self.form = nn.LayerNorm(8), Mixer(form), form

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x), other)


class Stack(nn.Module):
    """Blocks whose second input is whole on all ranks, however the first is cut."""

    def __init__(self, form: str, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block(form) for _ in range(2))
        self.recompute = recompute

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, other, use_reentrant=False) if self.recompute else block(x, other)
        return x


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, other = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    return x.requires_grad_(), other.requires_grad_()


def named() -> dict[str, torch.Tensor]:
    return dict(zip(("x", "other"), data(), strict=True))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of both inputs, and of what is whole on every rank."""
    x, other = data()
    model(x, other).square().mean().backward()
    of_other = torch.zeros_like(other) if other.grad is None else other.grad
    return [torch.as_tensor(x.grad), of_other, torch.as_tensor(model.get_submodule("first").weight.grad)]


def build(form: str, recompute: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Stack(form, recompute).double()


def parallel(form: str, sequence: bool, recompute: bool, overlap: bool):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    trial = Trial(lambda: build(form), named, lambda out: out.square().mean())
    model = parallelize(
        build(form, recompute), mesh, Plan(PLAN), sequence=sequence, overlap=overlap, trial=trial
    )
    twin = copy.deepcopy(model)
    return gradients(model), gradients(twin)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("sequence", "overlap"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("form", ["same", "other", "made", "half", "unused"])
def test_every_input_has_the_gradient_of_one_process(form, sequence, overlap, recompute):
    expected = gradients(build(form))
    for found in run_ranks(2, parallel, form, sequence, recompute, overlap):
        for got in found:
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def halve(module: nn.Module, args) -> None:
    with torch.no_grad():
        getattr(module, "q", module).weight.mul_(0.5)


def prepared(place: str):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    trial = Trial(lambda: build("same"), named, lambda out: out.square().mean())
    model = parallelize(build("same"), mesh, Plan(PLAN), sequence=True, overlap=True, trial=trial)
    model.get_submodule(place).register_forward_pre_hook(halve)
    return gradients(model)


@pytest.mark.parametrize("place", ["blocks.1.mixer", "blocks.1.mixer.q"])
def test_a_layer_whose_weight_is_changed_before_its_forward(place):
    """Its product is not made before that."""
    one = build("same")
    one.get_submodule(place).register_forward_pre_hook(halve)
    expected = gradients(one)
    for got in run_ranks(2, prepared, place):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def slow_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    time.sleep(0.1)  # others that draw at the same time would get in between
    x, other = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    return {"x": x, "other": other}


def tried_with_slow_inputs():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    trial = Trial(lambda: build("same"), slow_inputs, lambda out: out.square().mean())
    parallelize(build("same"), mesh, Plan(PLAN), trial=trial)


def test_inputs_of_a_trial_may_use_the_random_generator_of_all():
    run_ranks(2, tried_with_slow_inputs)


def kept():
    """What a module has read lives no longer than autograd needs it."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    trial = Trial(lambda: build("same"), named, lambda out: out.square().mean())
    model = parallelize(build("same"), mesh, Plan(PLAN), trial=trial)
    seen: list[weakref.ref] = []
    handle = model.get_submodule("blocks.0.mixer.q").register_forward_pre_hook(
        lambda module, args: seen.append(weakref.ref(args[0]))
    )
    x, other = data()
    loss = model(x, other).sum()
    handle.remove()
    del loss
    gc.collect()
    return [ref() is None for ref in seen]


def test_nothing_is_kept_when_a_module_is_done():
    assert run_ranks(2, kept) == [[True], [True]]


def decoder() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    config = AutoConfig.for_model("bart", vocab_size=40, max_position_embeddings=32, **sizes)
    config.is_decoder, config.is_encoder_decoder = True, False
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()


def crossing(model: nn.Module) -> list[torch.Tensor]:
    """The loss, and the gradient of the encoder's states that cross-attention reads."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 40, (2, 8), generator=generator)
    states = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64).requires_grad_()
    loss = model(input_ids=ids, labels=ids, encoder_hidden_states=states, use_cache=False).loss
    loss.backward()
    assert states.grad is not None
    return [loss.detach(), states.grad]


def cut_decoder(sequence: bool, overlap: bool):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(decoder(), mesh, sequence=sequence, overlap=overlap)
    cut = [n for n, p in model.named_parameters() if "encoder_attn." in n and layout_of(p).sharded_axes]
    return crossing(model), cut


@pytest.mark.parametrize(("sequence", "overlap"), [(False, False), (True, False), (True, True)])
def test_cross_attention_is_cut_and_right(sequence, overlap):
    expected = crossing(decoder())
    for got, cut in run_ranks(2, cut_decoder, sequence, overlap):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
        assert len(cut) == 2 * 7  # of two layers: weights of q, k, v, out and biases of q, k, v
