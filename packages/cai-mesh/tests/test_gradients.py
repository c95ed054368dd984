"""Gradients that accumulate in a chunk equal those of plain autograd, whoever writes them and however often."""

from __future__ import annotations

import copy

import pytest
import torch
from buffers import assert_equal, taken
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, accumulate_node, check_no_gradients, direct_linears
from cai_mesh.gradients.linear.seam import linear
from cai_mesh.layout import FlatChunk

VOCAB, WIDTH = 11, 6


@pytest.fixture(autouse=True)
def _dirty_memory(monkeypatch):
    """Memory that a buffer takes holds NaN, so that whatever reads it before it is written shows."""
    resize = torch.UntypedStorage.resize_

    def dirty(self, nbytes):
        resize(self, nbytes)
        if nbytes:
            self.fill_(255)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", dirty)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks of which one runs twice, a frozen one, an unused layer, a head tied to the embedding."""

    def __init__(self, recompute: bool = False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids):
        x = self.embed(ids)
        for i in (0, 1, 2, 1):
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.frozen(x))


def net(dtype=torch.float64, **kwargs):
    torch.manual_seed(3)
    return Net(**kwargs).to(dtype)


def buffered(model, dtype=None, *, frozen=False, **options):
    """A `GradBuffer` of the model's parameters, its linear layers writing there."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad or frozen]
    chunk = FlatChunk(named)
    params = [p for _, p in named]
    buffer = GradBuffer(chunk, params, dtype or params[0].dtype, params[0].device, **options)
    direct_linears(model, params)
    return buffer


def loss_of(model, seed=0):
    ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(ids).flatten(0, 1).double(), ids.flatten())


def plain(model):
    """{name: .grad, or zeros} of trainable parameters."""
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def count_of_direct(model):
    return sum("forward" in m.__dict__ for m in model.modules())


# -- equal to autograd ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_equals_autograd(backwards, recompute):
    model, twin = net(recompute=recompute), net()
    buffer = buffered(model)
    assert count_of_direct(model) == 9  # two of each block, one unused, the head, the embedding
    for seed in range(backwards):
        loss_of(model, seed).backward()
        loss_of(twin, seed).backward()
    assert all(p.grad is None for m in model.layers for p in (m.up.weight, m.down.weight))
    assert all(m.up.bias.grad is not None and m.norm.weight.grad is not None for m in model.layers)
    expected = plain(twin)
    assert_equal(taken(buffer), expected)
    assert all(p.grad is None for p in model.parameters())
    assert not expected["unused.weight"].any() and expected["embed.weight"].any()
    assert_equal(taken(buffer), expected)  # taking again changes nothing


@pytest.mark.parametrize("take_between", [False, True])
def test_gradients_may_be_taken_between_backwards(take_between):
    model, twin = net(), net()
    buffer = buffered(model)
    for seed in range(3):
        loss_of(model, seed).backward()
        loss_of(twin, seed).backward()
        if take_between:
            buffer.take()
    assert_equal(taken(buffer), plain(twin))


def test_a_tied_weight_adds_what_is_written_to_what_arrives():
    """The head writes; the embedding, called as a function here, leaves its part to autograd."""
    model, twin = net(), net()
    buffer = buffered(model)
    model.embed.forward = lambda ids: F.embedding(ids, model.embed.weight)
    loss_of(model).backward()
    loss_of(twin).backward()
    index = buffer.chunk.names.index("embed.weight")
    written, arrived = buffer.views[index].clone(), model.embed.weight.grad.clone()
    assert written.any() and arrived.any()
    assert torch.equal(taken(buffer)["embed.weight"], written + arrived)
    torch.testing.assert_close(written + arrived, twin.embed.weight.grad, rtol=1e-13, atol=1e-13)


def test_a_sparse_gradient_arrives_dense():
    torch.manual_seed(0)
    model = nn.Embedding(VOCAB, WIDTH, sparse=True)
    buffer = buffered(model)
    for expected in (1.0, 2.0):
        model(torch.tensor([1, 4])).sum().backward()
        got = taken(buffer)["weight"]
        assert torch.equal(got[[1, 4]], torch.full((2, WIDTH), expected))
        assert got.sum() == 2 * WIDTH * expected


def test_frozen_weights_are_left_out():
    model, twin = net(), net()
    buffer = buffered(model, frozen=True)
    assert not hasattr(model.frozen.weight, "cai_grad")
    loss_of(model).backward()
    loss_of(twin).backward()
    got = taken(buffer)
    assert not got.pop("frozen.weight").any() and not got.pop("frozen.bias").any()
    assert_equal(got, plain(twin))


def test_a_weight_frozen_later_gets_nothing():
    model, twin = net(), net()
    buffer = buffered(model)
    for m in (model, twin):
        m.layers[0].up.weight.requires_grad_(False)
        loss_of(m).backward()
    got = taken(buffer)
    assert not got.pop("layers.0.up.weight").any()
    assert_equal(got, plain(twin))


def test_float32_buffer_of_bfloat16_weights():
    model, twin = net(torch.bfloat16), net(torch.bfloat16)
    buffer = buffered(model, torch.float32)
    expected = {}
    for seed in range(3):
        loss_of(model, seed).backward()
        loss_of(twin, seed).backward()
        for n, grad in plain(twin).items():
            expected[n] = expected.get(n, 0) + grad.float()
        twin.zero_grad()
    once = {n for n in expected if not n.startswith("layers.1") and "embed" not in n}
    got = taken(buffer)
    assert all(g.dtype == torch.float32 for g in got.values())
    for n, value in expected.items():
        error = (got[n] - value).abs().max() / value.abs().max().clamp(min=1e-12)
        # a weight used once rounds as autograd's; .grad of norms and biases adds up in bfloat16 until it is taken
        assert error < (1e-6 if n in once and n.endswith(("up.weight", "down.weight")) else 2e-2), n


def test_many_small_bfloat16_gradients_do_not_stall():
    layer = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
    buffer = buffered(layer, torch.float32)
    x = torch.linspace(0.5, 1.5, WIDTH).bfloat16().expand(1, WIDTH).requires_grad_()
    for _ in range(600):
        layer(x).sum().backward()
    expected = 600 * x.float().expand(WIDTH, WIDTH)
    torch.testing.assert_close(taken(buffer)["weight"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 1, 2, 3), (0, 3)])
def test_linear_of_any_shape(shape):
    torch.manual_seed(0)
    weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (5,)))
    weight, bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    chunk = FlatChunk([("w", weight), ("b", bias)])
    buffer = GradBuffer(chunk, [weight, bias], torch.float64, torch.device("cpu"))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = linear(x, weight, bias)
    other = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    expected = F.linear(*other)
    assert torch.equal(out, expected)
    out.sin().sum().backward()
    expected.sin().sum().backward()
    assert_equal(taken(buffer), {"w": other[1].grad, "b": other[2].grad})
    torch.testing.assert_close(x.grad, other[0].grad)


def test_input_without_gradient_and_bias_frozen():
    layer = nn.Linear(3, 5).double()
    layer.bias.requires_grad_(False)
    buffer = buffered(layer)
    x = torch.randn(2, 3, dtype=torch.float64)
    layer(x).sum().backward()
    torch.testing.assert_close(taken(buffer)["weight"], x.sum(0).expand(5, 3))
    assert layer.bias.grad is None


# -- what must not add ---------------------------------------------------------------------------------------------


def one_layer():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, bias=False).double()
    return layer, buffered(layer), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)


def test_gradients_of_inputs_alone_add_nothing():
    layer, buffer, x = one_layer()
    (dx,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(dx, layer.weight.detach().sum(0).expand(4, 3)) and not buffer.has_gradients
    layer(x).sum().backward(inputs=[x])
    assert torch.equal(x.grad, dx) and not buffer.has_gradients
    layer(x).sum().backward()
    torch.testing.assert_close(taken(buffer)["weight"], x.detach().sum(0).expand(3, 3))
    torch.autograd.grad(layer(x).sum(), x)
    layer(x).sum().backward(inputs=[x])
    torch.testing.assert_close(taken(buffer)["weight"], x.detach().sum(0).expand(3, 3))


def test_backward_of_the_weight_alone_adds():
    layer, buffer, x = one_layer()
    layer(x).sum().backward(inputs=[layer.weight])
    assert x.grad is None
    torch.testing.assert_close(taken(buffer)["weight"], x.detach().sum(0).expand(3, 3))


class Conv1D(nn.Module):
    """GPT-2's layer: a weight [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


@pytest.mark.parametrize("transposed", [False, True])
def test_differentiating_twice(transposed):
    torch.manual_seed(0)
    layer = Conv1D(3, 3) if transposed else nn.Linear(3, 3)
    plain = copy.deepcopy(layer.double())
    buffer, x, found = buffered(layer), torch.randn(4, 3, dtype=torch.float64, requires_grad=True), []
    for each in (layer, plain):
        (dx,) = torch.autograd.grad(each(x).pow(3).sum(), x, create_graph=True)
        dx.pow(2).sum().backward()
        found.append(x.grad)
        x.grad = None
    assert torch.allclose(*found)
    assert torch.allclose(taken(buffer)["weight"], plain.weight.grad)


def test_autocast_takes_the_path_of_torch():
    layer, buffer, x = one_layer()
    layer, x = layer.float(), x.detach().float()
    buffer = buffered(layer)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert not buffer.is_open and layer.weight.grad is not None
    grad = layer.weight.grad.clone()
    assert torch.equal(taken(buffer)["weight"], grad)


def test_no_grad_and_weights_without_buffer_take_the_path_of_torch():
    layer, buffer, x = one_layer()
    with torch.no_grad():
        assert not layer(x).requires_grad
    other = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
    linear(x, other).sum().backward()
    torch.testing.assert_close(other.grad, x.detach().sum(0).expand(2, 3))
    assert not buffer.has_gradients


# -- which layers write --------------------------------------------------------------------------------------------


def double(grad):
    return 2 * grad


@pytest.mark.parametrize("kind", ["tensor", "post"])
def test_weights_with_hooks_are_left_alone(kind):
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, bias=False).double()
    seen = []
    if kind == "tensor":
        layer.weight.register_hook(double)
    else:
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    buffer = buffered(layer)
    assert count_of_direct(layer) == 0
    x = torch.randn(4, 3, dtype=torch.float64)
    layer(x).sum().backward()
    expected = x.sum(0).expand(3, 3)
    torch.testing.assert_close(taken(buffer)["weight"], 2 * expected if kind == "tensor" else expected)
    assert len(seen) == (kind == "post")


@pytest.mark.parametrize("kind", ["tensor", "post"])
def test_hooks_of_a_later_day_fire_too(kind):
    layer, buffer, x = one_layer()
    seen = []
    if kind == "tensor":
        layer.weight.register_hook(lambda g: seen.append(g.clone()))
    else:
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    layer(x).sum().backward()
    expected = x.detach().sum(0).expand(3, 3)
    torch.testing.assert_close(seen, [expected])
    torch.testing.assert_close(taken(buffer)["weight"], expected)


class OwnLinear(nn.Linear):
    def forward(self, input):
        return 3 * F.linear(input, self.weight)


def test_layers_with_a_forward_of_their_own_stay():
    model = nn.ModuleList([OwnLinear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
    own = model[1].forward = lambda x: x
    direct_linears(model, [model[0].weight, model[1].weight])
    assert "forward" not in model[0].__dict__ and model[1].forward is own
    assert "forward" not in model[2].__dict__  # not among the parameters


def test_a_copy_of_the_model_shares_nothing():
    model, twin = net(), net()
    buffer = buffered(model)
    other = copy.deepcopy(model)
    loss_of(other).backward()
    loss_of(twin).backward()
    assert not buffer.has_gradients
    assert_equal(plain(other), plain(twin))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    loss_of(model).backward()
    assert_equal(taken(buffer), plain(twin))


def test_accumulate_node_is_that_of_the_leaf():
    weight = nn.Parameter(torch.ones(2))
    node, fired = accumulate_node(weight), []
    node.register_hook(lambda *_: fired.append(1))
    (weight * 2).sum().backward()
    assert node.variable is weight and fired == [1]
    with torch.no_grad():
        assert accumulate_node(weight) is node


def test_a_gradient_that_waits_is_refused():
    weight = nn.Parameter(torch.ones(2))
    check_no_gradients([weight])
    weight.grad = torch.ones(2)
    with pytest.raises(PlanError, match="already has a gradient"):
        check_no_gradients([nn.Parameter(torch.ones(1)), weight])


# -- the life of the memory ----------------------------------------------------------------------------------------


def bytes_of(buffer):
    return buffer.tensor.untyped_storage().nbytes()


def test_memory_comes_with_a_backward_and_goes_with_close():
    opened = []
    model = net()
    buffer = buffered(model, before_open=lambda: opened.append(bytes_of(buffer)))
    for n in (1, 2):
        assert bytes_of(buffer) == 0 and not buffer.is_open and not buffer.has_gradients
        loss = loss_of(model)
        assert bytes_of(buffer) == 0  # a forward takes nothing
        loss.backward()
        assert bytes_of(buffer) == 8 * buffer.chunk.numel and buffer.has_gradients
        loss_of(model).backward()
        buffer.take()
        buffer.open()
        assert opened == [0] * n  # called once, before the memory is there
        buffer.close()
        buffer.close()


def test_a_gradient_that_only_arrives_counts():
    layer = nn.LayerNorm(3)
    buffer = buffered(layer)
    layer(torch.randn(2, 3)).sum().backward()
    assert buffer.has_gradients and bytes_of(buffer) == 0


def test_closing_drops_what_was_written():
    layer, buffer, x = one_layer()
    layer(x).sum().backward()
    buffer.close()
    layer(x).sum().backward()
    torch.testing.assert_close(taken(buffer)["weight"], x.detach().sum(0).expand(3, 3))


def test_padding_is_zero():
    model = net()
    buffer = buffered(model)
    for _ in range(2):
        loss_of(model).backward()
        full = buffer.take()
        rest = torch.ones(buffer.chunk.numel, dtype=torch.bool)
        for slot in buffer.chunk.slots:
            rest[slot.offset : slot.end] = False
        assert rest.any() and not full[rest].any() and full.isfinite().all()
        buffer.close()


def test_what_is_handed_over_survives():
    model, twin = net(), net()
    buffer = buffered(model)
    views = [p.cai_grad for p in buffer.params]
    kept = []
    for seed in range(3):
        loss_of(model, seed).backward()
        kept.append(buffer.take() if seed == 2 else (buffer.take(), buffer.hand_over())[1])
        assert seed == 2 or (bytes_of(buffer) == 0 and not buffer.is_open)
    assert all(p.cai_grad is view for p, view in zip(buffer.params, views, strict=True))
    for seed, full in enumerate(kept):
        twin.zero_grad()
        loss_of(twin, seed).backward()
        views = buffer.chunk.views(full)
        assert_equal(dict(zip(buffer.chunk.names, views, strict=True)), plain(twin))
    assert len({full.data_ptr() for full in kept}) == 3


# -- compiled ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield lambda fn: torch.compile(fn, fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("release", ["close", "hand_over"])
def test_compiled_blocks_write_in_place_and_compile_once(compiled, release):
    model, twin = net(), net()
    buffer = buffered(model)
    for layer in model.layers:
        layer.forward = compiled(layer.forward)
    for seed in range(3):
        loss = loss_of(model, seed)
        assert bytes_of(buffer) == 0
        loss.backward()
        for layer in model.layers:
            assert layer.up.weight.grad is None and layer.up.weight.cai_grad.any()
        twin.zero_grad()
        loss_of(twin, seed).backward()
        assert_equal(taken(buffer), plain(twin), 1e-12)
        getattr(buffer, release)()


def test_compiled_and_accumulated(compiled):
    model, twin = net(), net()
    buffer = buffered(model)
    for layer in model.layers:
        layer.forward = compiled(layer.forward)
    for seed in range(3):
        loss_of(model, seed).backward()
        loss_of(twin, seed).backward()
    assert_equal(taken(buffer), plain(twin), 1e-12)


def test_compiled_gradients_of_inputs_alone_add_nothing(compiled):
    layer, buffer, x = one_layer()
    fn = compiled(lambda y: layer(y).sin())
    torch.autograd.grad(fn(x).sum(), x)
    assert not buffer.has_gradients
    fn(x).sum().backward()
    dy = F.linear(x, layer.weight).detach().cos()
    torch.testing.assert_close(taken(buffer)["weight"], dy.t() @ x.detach())


class Twice(nn.Module):
    """One weight used twice on one input: equal calls, which a compiler may merge."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.up(x) + self.up(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_equal_calls_in_one_graph_both_count(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(4, WIDTH, requires_grad=True)
    model(x).sum().backward()
    expected, model.up.weight.grad = model.up.weight.grad, None
    buffer = buffered(model, torch.float32)
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    model(x).sum().backward()
    torch.testing.assert_close(taken(buffer)["up.weight"], expected)
