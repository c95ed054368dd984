"""Layers cut in 1d write their gradients into chunks: eager, compiled and deferred, as one process computes them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from cai_mesh.comm import Started
from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, PlainProducts, defer, direct_linears
from cai_mesh.layout import FlatChunk, layout_of
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import Plan, parallelize

WIDTH = 12
PLAN = Plan(
    {
        "qkv": "packed_colwise:3",
        "out": "rowwise",
        "up": "colwise",
        "down": "rowwise",
        "whole_up": "colwise_gather_output",
        "whole_down": "rowwise_split_input",
        "conv": "colwise",
        "vonc": "rowwise",
    }
)


class Layers(nn.Module):
    """Every role a linear layer can have, with and without biases, both ways to lay out a weight."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.whole_up, self.whole_down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.vonc = Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, 2 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(torch.tanh(q) * k + v)
        x = x + self.down(F.silu(self.up(x)))
        x = x + self.whole_down(torch.tanh(self.whole_up(x)))
        return x + self.vonc(torch.tanh(self.conv(x)))


def build():
    torch.manual_seed(2)
    model = Layers().double()
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.3)
    return model


def batch(seed):
    return torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference():
    model, x = build(), [batch(seed).requires_grad_() for seed in range(2)]
    outs = [model(t) for t in x]
    for y in outs:
        y.sin().sum().backward()
    return [y.detach() for y in outs], [t.grad for t in x], {n: p.grad for n, p in model.named_parameters()}


def rules(form):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(build(), mesh, PLAN)
    params = dict(model.named_parameters())
    buffer = GradBuffer(FlatChunk(params.items()), list(params.values()), torch.float64, torch.device("cpu"))
    direct_linears(model, params.values())
    fn = torch.compile(model, fullgraph=True) if "compiled" in form else model
    outs, grads, kept = [], [], None
    for seed in range(2):
        x = batch(seed).requires_grad_()
        if "deferred" in form:
            with defer(params.values()) as kept_now:
                (y := fn(x)).sin().sum().backward()
            assert kept is None or kept.flush() is None
            kept = kept_now
        else:
            (y := fn(x)).sin().sum().backward()
        outs.append(y.detach())
        grads.append(x.grad)
    late = {n for n, p in params.items() if p.grad is not None}
    assert not any(n.endswith("weight") for n in late), "a weight's gradient took another way"
    if kept is not None:
        kept.flush()
    views = buffer.chunk.views(buffer.take())
    expected_outs, expected_grads, expected = reference()
    for got, wanted in zip(outs + grads, expected_outs + expected_grads, strict=True):
        torch.testing.assert_close(got, wanted)
    for (name, p), view in zip(params.items(), views, strict=True):
        for here, box in layout_of(p).slices():
            torch.testing.assert_close(view[here], expected[name][box.slices()], msg=name)


@pytest.mark.parametrize("form", ["eager", "deferred", "compiled", "compiled deferred"])
def test_gradients_in_chunks_equal_one_process(form):
    run_ranks(2, rules, form, timeout=200)


def events():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, Plan({"0": "colwise", "1": "rowwise"})
    )
    params = dict(model.named_parameters())
    buffer = GradBuffer(FlatChunk(params.items()), list(params.values()), torch.float32, torch.device("cpu"))
    direct_linears(model, params.values())
    seen = []
    issue, wait, product = dist.all_reduce, Started.wait, PlainProducts.write_weight_grad
    dist.all_reduce = lambda *args, **kwargs: (seen.append("sum"), issue(*args, **kwargs))[1]
    Started.wait = lambda self: (seen.append("wait"), wait(self))[1]
    PlainProducts.write_weight_grad = lambda *args, **kwargs: (
        seen.append("product"),
        product(*args, **kwargs),
    )[1]
    try:
        y = model(torch.ones(1, 4, requires_grad=True))
        seen.clear()
        y.sum().backward()
    finally:
        dist.all_reduce, Started.wait, PlainProducts.write_weight_grad = issue, wait, product
    assert buffer.is_open
    return seen


def test_the_sum_of_input_gradients_runs_beside_the_weights_gradient():
    assert run_ranks(2, events)[0] == ["product", "sum", "product", "wait"]


class OwnForward(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def strangers():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    for layer in (OwnForward(4, 4), replaced, nn.LayerNorm(4)):
        weight = layer.weight
        with pytest.raises(PlanError, match="cannot be cut as a linear layer"):
            parallelize(nn.Sequential(layer), mesh, Plan({"0": "colwise"}))
        assert layer.weight is weight


def test_a_layer_with_a_forward_of_its_own_is_refused():
    run_ranks(2, strangers)


class Latent(nn.Module):
    """Attention of four query heads over one key/value head, with rotary features that all heads share."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_key_value_groups, self.qk_rope_head_dim = 4, 4, 2
        self.q_proj, self.k_proj = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 3)
        self.kv_a, self.kv_b, self.o_proj = nn.Linear(WIDTH, 6), nn.Linear(4, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        latent, rotary = self.kv_a(x).split((4, 2), -1)
        q, v = (y.unflatten(-1, (-1, 3)) for y in (self.q_proj(x), self.kv_b(latent)))
        k = self.k_proj(x).unflatten(-1, (-1, 3)).repeat_interleave(self.num_key_value_groups, -2)
        return self.o_proj((torch.tanh(q) * k + v * rotary.sum(-1)[..., None, None]).flatten(-2))


LATENT = Plan(
    {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "kv_a": "mla_kv_a_proj",
        "kv_b": "colwise",
        "o_proj": "rowwise",
    }
)


def partly_used(compiled):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(2)
    whole = Latent().double()
    x = batch(0).requires_grad_()
    expected = whole(x)
    expected.sin().sum().backward()
    grads, inputs = {n: p.grad for n, p in whole.named_parameters()}, x.grad
    torch.manual_seed(2)
    model = parallelize(Latent().double(), mesh, LATENT)
    params = dict(model.named_parameters())
    buffer = GradBuffer(FlatChunk(params.items()), list(params.values()), torch.float64, torch.device("cpu"))
    direct_linears(model, params.values())
    x = batch(0).requires_grad_()
    y = (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(x)
    y.sin().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, inputs)
    for (name, p), view in zip(params.items(), buffer.chunk.views(buffer.take()), strict=True):
        for here, box in layout_of(p).slices():
            torch.testing.assert_close(view[here], grads[name][box.slices()], msg=name)


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_of_which_ranks_use_parts_write_whole_gradients_to_chunks(compiled):
    run_ranks(2, partly_used, compiled, timeout=200)
