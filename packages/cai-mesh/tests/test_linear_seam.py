"""Linear layers by rules: eager, compiled and deferred give the gradients of plain autograd, whatever the products."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from buffers import assert_equal, taken
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from cai_mesh.errors import PlanError
from cai_mesh.gradients import (
    LOCAL,
    GradBuffer,
    Local,
    PlainProducts,
    defer,
    direct_linears,
    own_products,
    route,
    routed,
)
from cai_mesh.gradients.linear.seam import linear
from cai_mesh.layout import FlatChunk

VOCAB, WIDTH = 24, 16


class Block(nn.Module):
    """A gated MLP: two layers read one input, and a compiler reuses what lies between."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.conv = nn.Linear(2 * WIDTH, WIDTH, bias=False), Conv1D(WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.conv(self.down(F.silu(self.gate(y)) * self.up(y)))


class Net(nn.Module):
    """Blocks of which one runs twice; the head is tied to the embedding."""

    def __init__(self, recompute=False):
        super().__init__()
        self.embed, self.recompute = nn.Embedding(VOCAB, WIDTH), recompute
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for i in (0, 1, 0):
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def net(**options):
    torch.manual_seed(1)
    return Net(**options).double()


def loss_of(model, seed=0):
    ids = torch.randint(0, VOCAB, (3, 5), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def buffered(model, dtype=torch.float64):
    params = dict(model.named_parameters())
    buffer = GradBuffer(FlatChunk(params.items()), list(params.values()), dtype, torch.device("cpu"))
    direct_linears(model, params.values())
    return buffer


def expected(seeds, **options):
    twin = net(**options)
    for seed in seeds:
        loss_of(twin, seed).backward()
    return {n: p.grad for n, p in twin.named_parameters()}


@pytest.fixture
def compile_blocks():
    torch._dynamo.reset()

    def compiled(model, where):
        if where == "blocks":
            for layer in model.layers:
                layer.forward = torch.compile(layer.forward, fullgraph=True)
        elif where == "model":
            model.forward = torch.compile(model.forward, fullgraph=True)

    yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("where", ["eager", "blocks", "model"])
def test_every_form_equals_autograd(compile_blocks, where, recompute, deferred):
    model = net(recompute=recompute)
    buffer = buffered(model)
    compile_blocks(model, where)
    if not deferred:
        for seed in range(2):
            loss_of(model, seed).backward()
        assert_equal(taken(buffer), expected(range(2)))
        return
    waiting = []
    for seed in range(2):  # two microbatches wait at once
        with defer(model.parameters()) as kept:
            loss_of(model, seed).backward()
        waiting.append(kept)
    assert not buffer.is_open and buffer.has_gradients
    assert "layers.0.up.weight" in {buffer.chunk.names[i] for i in buffer.written}
    for kept in waiting:
        kept.flush()
    opened = buffer.is_open
    got = taken(buffer)
    assert opened
    assert_equal(got, expected(range(2)))
    waiting[0].flush()  # once is enough
    assert_equal(taken(buffer), got)


@pytest.mark.parametrize("take_between", [False, True])
def test_forwards_of_microbatches_wait_for_their_backwards(compile_blocks, take_between):
    """What a graph has saved may be written to by the backwards before its own: blocks compiled, the head not."""
    model = net()
    buffer = buffered(model)
    compile_blocks(model, "blocks")
    losses = [loss_of(model, seed) for seed in range(3)]
    for loss in losses:
        loss.backward()
        if take_between:
            buffer.take()
    assert_equal(taken(buffer), expected(range(3)))


def test_deferred_and_immediate_backwards_mix():
    model = net()
    buffer = buffered(model)
    with defer(model.parameters()) as kept:
        loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    kept.flush()
    assert_equal(taken(buffer), expected(range(2)))


def test_who_takes_gets_what_waits():
    model = net()
    buffer = buffered(model)
    with defer(model.parameters()) as kept:
        loss_of(model).backward()
    got = taken(buffer)
    assert_equal(got, expected([0]))
    kept.flush()
    assert_equal(taken(buffer), got)


def test_dropped_gradients_are_not_made_later():
    model = net()
    buffer = buffered(model)
    with defer(model.parameters()) as kept:
        loss_of(model, 0).backward()
    for p in model.parameters():
        p.grad = None
    buffer.close()
    kept.flush()
    assert not buffer.has_gradients
    loss_of(model, 1).backward()
    assert_equal(taken(buffer), expected([1]))


def test_inner_deferrals_keep_their_own():
    model = net()
    buffer = buffered(model)
    with defer(model.parameters()) as outer:
        with defer(model.parameters()) as inner:
            loss_of(model, 0).backward()
        loss_of(model, 1).backward()
    inner.flush()
    outer.flush()
    assert_equal(taken(buffer), expected(range(2)))


def test_float32_chunks_of_bfloat16_transposed_weights():
    torch.manual_seed(0)
    layer = Conv1D(8, 4).bfloat16()
    buffer = buffered(layer, torch.float32)
    x = torch.randn(3, 4).bfloat16().requires_grad_()
    layer(x).sum().backward()
    layer(x).sum().backward()
    got = taken(buffer)["weight"]
    assert got.dtype == torch.float32 and got.shape == (4, 8)
    torch.testing.assert_close(
        got, 2 * x.detach().sum(0, dtype=torch.float32)[:, None].expand(4, 8), rtol=1e-2, atol=1e-2
    )


def test_a_rank_without_rows_of_a_weight_has_no_gradient():
    layer, empty = nn.Linear(4, 2, bias=False), nn.Linear(4, 0, bias=False)
    both = nn.ModuleList([layer, empty])
    buffer = buffered(both, torch.float32)
    x = torch.randn(3, 4).requires_grad_()
    (layer(x).sum() + empty(x).sum()).backward()
    torch.testing.assert_close(taken(buffer)["0.weight"], x.detach().sum(0).expand(2, 4))
    assert x.grad.equal(layer.weight.detach().sum(0).expand(3, 4))


# -- products that are not torch's -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Halved(PlainProducts):
    """Products whose weight gradient is half of torch's, so that one sees who made it."""

    @property
    def key(self):
        return "halved"

    def weight_grad(self, operands):
        return 0.5 * super().weight_grad(operands)

    def write_weight_grad(self, operands, out, *, fresh):
        grad = self.weight_grad(operands)
        out.copy_(grad) if fresh else out.add_(grad)


class HalvedLinear(nn.Linear):
    """A kernel's layer: it knows the seam only by two names."""

    linear_products = Halved()

    def forward(self, x):
        run = getattr(self, "run_products", None)
        if run is not None:
            return run(self.linear_products, x)
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("where", ["eager", "compiled"])
@pytest.mark.parametrize("chunked", [False, True], ids=["autograd", "chunk"])
def test_a_layer_brings_its_products(where, chunked):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = HalvedLinear(WIDTH, WIDTH).double()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).sin().sum(), [layer.weight, layer.bias, x])
    buffer = buffered(layer) if chunked else None
    assert chunked or route(layer)
    assert "forward" not in layer.__dict__
    fn = torch.compile(layer, fullgraph=True) if where == "compiled" else layer
    fn(x).sin().sum().backward()
    got = taken(buffer) if buffer else {n: p.grad for n, p in layer.named_parameters()}
    torch.testing.assert_close(got["weight"], 0.5 * wanted[0])
    torch.testing.assert_close(got["bias"], wanted[1])
    torch.testing.assert_close(x.grad, wanted[2])


def test_other_products_for_one_call():
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False).double()
    buffer = buffered(layer)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    layer.run_products(Halved(), x).sum().backward()
    layer.run_products(None, x).sum().backward()
    torch.testing.assert_close(taken(buffer)["weight"], 1.5 * x.sum(0).expand(WIDTH, WIDTH))


@dataclass(frozen=True)
class Shared(Local):
    """A rule that is not Local."""

    @property
    def key(self):
        return "shared"


def test_other_products_of_a_shared_layer_are_refused():
    layer = nn.Linear(4, 4)
    assert route(layer, Shared(PlainProducts()))
    with pytest.raises(PlanError, match="before parallelize"):
        layer.run_products(Halved(), torch.ones(1, 4))


# -- which modules -----------------------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class SameForward(nn.Linear):
    """As torch's own subclasses, and those that fully_shard makes."""


def test_what_is_routed():
    replaced = nn.Linear(2, 2)
    replaced.forward = lambda x: x
    for other in (OwnForward(2, 2), replaced, nn.Embedding(2, 2), nn.LayerNorm(2)):
        before = dict(other.__dict__)
        assert not route(other) and routed(other) is None and other.__dict__.keys() == before.keys()
    for layer in (nn.Linear(2, 2), SameForward(2, 2), Conv1D(2, 2), HalvedLinear(2, 2)):
        assert own_products(layer) is not None and route(layer)
        rule = routed(layer)
        forward = layer.__dict__.get("forward")
        assert route(layer) and routed(layer) is rule and layer.__dict__.get("forward") is forward


def test_a_replaced_forward_that_asks_is_kept():
    layer = nn.Linear(WIDTH, WIDTH, bias=False).double()

    def forward(x):
        return 2 * layer.run_products(None, x)

    forward.calls_run_products = True
    layer.forward = forward
    buffer = buffered(layer)
    assert layer.forward is forward
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(taken(buffer)["weight"], 2 * x.sum(0).expand(WIDTH, WIDTH))


def test_a_copy_computes_alone():
    layer = HalvedLinear(WIDTH, WIDTH).double()
    plain = nn.Linear(WIDTH, WIDTH).double()
    model = nn.Sequential(layer, plain)
    buffer = buffered(model)
    other = copy.deepcopy(model)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    other(x).sum().backward()
    assert not buffer.has_gradients and other[0].weight.grad is not None and other[1].weight.grad is not None
    assert other[0].run_products.__self__ is other[0] and other[1].forward.__self__ is other[1]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3)])
def test_rules_take_inputs_of_any_shape_without_a_buffer(shape):
    torch.manual_seed(0)
    layer = nn.Linear(3, 5).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])
    got = torch.autograd.grad(
        linear(x, layer.weight, layer.bias, Shared(PlainProducts())).sin().sum(), [x, *layer.parameters()]
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_rules_under_autocast():
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = layer(x)
        got = linear(x, layer.weight, layer.bias, Shared(PlainProducts()))
    assert torch.equal(got, wanted) and got.dtype == torch.bfloat16
    for a, b in zip(
        *(torch.autograd.grad(y.sum(), [x, *layer.parameters()]) for y in (got, wanted)), strict=True
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_frozen_weights_pass_the_gradient_on():
    layer = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(linear(x, layer.weight, layer.bias, Shared(PlainProducts())).sum(), x)
    torch.testing.assert_close(dx, layer.weight.sum(0).expand(3, WIDTH))
    assert linear(x, layer.weight, None, LOCAL).grad_fn.name() != "_LinearBackward"
