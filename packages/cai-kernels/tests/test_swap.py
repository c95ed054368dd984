"""`swap` finds what modules compute, changes no number but by rounding, and can be undone."""

from __future__ import annotations

import copy
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cai_kernels import KernelError, swap
from cai_kernels.swap import Logits, defer_logits

WIDTH, VOCAB = 16, 31


class LlamaNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        ).to(x.dtype)


class GemmaNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.zeros(width))

    def forward(self, x):
        wide = x.float()
        return (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight.float())
        ).to(x.dtype)


class ScaledNorm(LlamaNorm):
    """Looks like a norm and is none."""

    def forward(self, x):
        return super().forward(x) * 2


class Mlp(nn.Module):
    def __init__(self, act: nn.Module):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.act = act

    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate(x)))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down, self.act = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH), nn.SiLU()

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Branching(Mlp):
    def forward(self, x):
        return super().forward(x) if x.sum() > -1e9 else x


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 1, -1)).permute(2, 0, 3, 1, 4)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] / torch.arange(1, 5, device=x.device)
        angle = torch.cat((angle, angle), -1)[None].to(x.dtype)
        q, k = apply_rotary(q, k, angle.cos(), angle.sin())
        k, v = k.expand_as(q), v.expand_as(q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """An output layer found by `get_output_embeddings`, and what a loss does to its logits by choice."""

    def __init__(self, shape=lambda logits: logits):
        super().__init__()
        self.embed, self.shape = nn.Embedding(VOCAB, WIDTH), shape
        self.norm, self.attention, self.mlp = LlamaNorm(WIDTH), Attention(), Mlp(nn.SiLU())
        self.other, self.last = GemmaNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.other(x))
        return self.shape(self.head(self.last(x)))


def build(*args) -> Model:
    torch.manual_seed(2)
    model = Model(*args)
    for name, param in model.named_parameters():
        if param.dim() == 1:
            nn.init.normal_(param, 1.0 if name == "norm.weight" else 0.0, 0.2)
    return model


IDS = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(5))


def shifted(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())


def trained(model, loss=shifted):
    value = loss(model(IDS))
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_trains_alike(model, twin, loss=shifted):
    value, gradients = trained(model, loss)
    expected, theirs = trained(twin, loss)
    torch.testing.assert_close(value, expected)
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_everything_is_found_and_trains_alike():
    model, twin = build(), build()
    record = swap(model)
    assert {(r.name, r.kernel) for r in record.replaced} == {
        ("norm", 'rms_norm(casting="llama")'),
        ("other", 'rms_norm(casting="gemma")'),
        ("last", "layer_norm"),
        ("mlp", "swiglu"),
        ("attention", "rope(interleaved=False)"),
        ("attention", "attention by torch, fastest first"),
        ("head", "linear_cross_entropy"),
    }
    assert not record.kept
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert list(model.state_dict()) == list(twin.state_dict())
    assert_trains_alike(model, twin)
    assert "swiglu" in str(record) and "rope" in str(record)


def test_undo_gives_every_forward_back():
    model = build()
    record = swap(model)
    record.undo()
    assert not any("forward" in m.__dict__ for m in model.modules()) and not record.replaced
    assert type(model(IDS)) is torch.Tensor
    assert swap(model).replaced


def test_undo_refuses_what_was_wrapped_since():
    model = build()
    record = swap(model)
    kept = model.mlp.forward
    model.mlp.forward = lambda x: kept(x)
    with pytest.raises(KernelError, match="'mlp' has been replaced since"):
        record.undo()
    assert "forward" in model.norm.__dict__


def test_a_copy_runs_on_its_own_parameters():
    model = build()
    swap(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    twin = build()
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(1.5)
    assert_trains_alike(other, twin)
    assert all(p.grad is None for p in model.parameters())


def test_what_was_replaced_is_left_and_said():
    model = build()
    model.mlp.forward = lambda x: x
    first = swap(model, kinds=["norm"])
    record = swap(model)
    assert ("mlp", "activation", "its forward was replaced before") in {
        (k.name, k.kind, k.reason) for k in record.kept
    }
    assert {k.name for k in record.kept} == {"mlp", "norm", "other", "last"}
    assert {r.kind for r in first.replaced} == {"norm"} and {r.kind for r in record.replaced} == {
        "rope",
        "attention",
        "loss",
    }


@pytest.mark.parametrize(
    ("act", "kernel"),
    [
        (nn.SiLU(), "swiglu"),
        (nn.GELU(), 'geglu(approximate="none")'),
        (nn.GELU(approximate="tanh"), 'geglu(approximate="tanh")'),
        (nn.ReLU(), None),
    ],
)
def test_activations_by_what_they_compute(act, kernel):
    model = nn.Sequential(Mlp(act))
    x = torch.randn(3, WIDTH)
    expected = model(x)
    assert [r.kernel for r in swap(model).replaced] == ([kernel] if kernel else [])
    torch.testing.assert_close(model(x), expected)


def test_a_packed_gate_and_hooks_of_children():
    model, seen = nn.Sequential(Packed()), []
    model[0].both.register_forward_hook(lambda *_: seen.append("both"))
    x = torch.randn(3, 5, WIDTH)
    expected = model(x)
    assert [r.kernel for r in swap(model).replaced] == ["swiglu"]
    torch.testing.assert_close(model(x), expected)
    assert seen == ["both"] * 2


def test_what_cannot_be_traced_is_said():
    record = swap(nn.Sequential(Branching(nn.SiLU())))
    assert not record.replaced and "cannot be traced" in record.kept[0].reason


def test_what_only_looks_like_a_norm_is_left():
    assert not swap(nn.Sequential(ScaledNorm(WIDTH), nn.BatchNorm1d(WIDTH))).replaced


def interleaved_half(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotate_pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + interleaved_half(q) * sin, k * cos + interleaved_half(k) * sin


def rotate_some(q, k, cos, sin, unsqueeze_dim=1):
    """Neighbours, from a table of halves, of the first dims of a head (GLM)."""
    cos, sin = (
        t[..., : t.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin)
    )
    size = cos.shape[-1]
    turned = [
        torch.cat((x[..., :size] * cos + interleaved_half(x[..., :size]) * sin, x[..., size:]), -1)
        for x in (q, k)
    ]
    return turned[0], turned[1]


def rotate_wrongly(q, k, cos, sin, unsqueeze_dim=1):
    return q + cos.unsqueeze(unsqueeze_dim), k


class Rotates(nn.Module):
    def __init__(self, pairs: bool, size: int):
        super().__init__()
        self.pairs, self.size = pairs, size

    def table(self, x):
        angle = torch.arange(x.shape[2])[:, None] / torch.arange(1, self.size // 2 + 1)
        angle = (angle.repeat_interleave(2, -1) if self.pairs else torch.cat((angle, angle), -1))[None]
        return angle.cos(), angle.sin()


class RotatesPairs(Rotates):
    def forward(self, q, k):
        return rotate_pairs(q, k, *self.table(q))


class RotatesLast(Rotates):
    def forward(self, q, k):
        q, k = rotate_pairs(q.transpose(1, 2), k.transpose(1, 2), *self.table(q), unsqueeze_dim=2)
        return q.transpose(1, 2), k.transpose(1, 2)


class RotatesSome(Rotates):
    def forward(self, q, k):
        return rotate_some(q, k, *self.table(q))


class RotatesWrongly(Rotates):
    def forward(self, q, k):
        return rotate_wrongly(q, k, *self.table(q))


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (RotatesPairs(True, 8), ["rope(interleaved=True)"]),
        (RotatesLast(True, 8), ["rope(interleaved=True)"]),
        (RotatesSome(False, 4), ["rope(interleaved=True)"]),
        (RotatesWrongly(False, 8), []),
    ],
)
def test_rotations_by_what_they_compute(module, found):
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    expected = module(q, k)
    assert [r.kernel for r in swap(module).replaced] == found
    for got, want in zip(module(q, k), expected, strict=True):
        torch.testing.assert_close(got, want)


class CenteredNorm(LlamaNorm):
    """A layer norm with no bias and no name that says so."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def test_a_layer_norm_without_bias():
    model, x = nn.Sequential(CenteredNorm(WIDTH)), torch.randn(3, WIDTH)
    expected = model(x)
    assert [r.kernel for r in swap(model).replaced] == ["layer_norm"]
    torch.testing.assert_close(model(x), expected)


class ScaledGroupNorm(nn.GroupNorm):
    """Computes something else, and is left."""

    def forward(self, x):
        return 2 * super().forward(x)


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8, eps=1e-3), nn.SiLU(),
        nn.Conv2d(8, 6, 3, padding=1), nn.GroupNorm(3, 6, affine=False), ScaledGroupNorm(2, 6),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_norms_train_alike(monkeypatch, layout, dtype):
    from cai_kernels.swap import group_norms

    calls, kernel = [], group_norms.group_norm
    monkeypatch.setattr(group_norms, "group_norm", lambda *a, **k: (calls.append(0), kernel(*a, **k))[1])
    plain = images().to(dtype, memory_format=layout)
    with torch.no_grad():
        plain[1].weight.uniform_(0.5, 2)
        plain[1].bias.normal_()
    swapped = copy.deepcopy(plain)
    record = swap(swapped)
    assert [(r.name, r.kernel) for r in record.replaced] == [("1", "group_norm"), ("4", "group_norm")]
    x = torch.randn(2, 3, 5, 7, dtype=dtype).to(memory_format=layout)
    results = []
    for model in (plain, swapped):
        x = x.detach().requires_grad_()
        y = model(x)
        y.square().mean().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(calls) == (2 if dtype == torch.float32 else 0), "what the kernel does not take runs as it did"


def test_group_norms_leave_autocast_and_graphs_to_torch(monkeypatch):
    from cai_kernels.swap import group_norms

    monkeypatch.setattr(group_norms, "group_norm", lambda *a, **k: pytest.fail("the kernel ran"))
    plain = images()[:2]
    swapped = copy.deepcopy(plain)
    swap(swapped)
    x = torch.randn(2, 3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(swapped(x), plain(x))
    whole = torch.compile(swapped, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), plain(x))
    with pytest.raises(RuntimeError, match="channels"):
        swapped[1](torch.randn(2, 7, 4, 4))


def test_meta_models_are_recognized():
    with torch.device("meta"):
        model = Model()
    assert len(swap(model).replaced) == 7


class GatedNorm(LlamaNorm):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * torch.nn.functional.silu(gate))


def test_a_norm_that_takes_a_gate_is_left():
    model = build()
    model.norm = GatedNorm(WIDTH)
    record = swap(model)
    assert "norm" in {k.name for k in record.kept if "takes x, gate" in k.reason}
    assert "forward" not in model.norm.__dict__


def test_verify_undoes_what_differs(monkeypatch):
    model = build()
    assert swap(model, verify={"ids": IDS}).replaced
    other = build()
    from cai_kernels.swap import norms

    monkeypatch.setattr(norms, "_alike", lambda *_, **__: True)  # anything passes for a norm
    other.norm = ScaledNorm(WIDTH)
    other.eval()
    other.mlp.train()
    with pytest.raises(KernelError, match="computes something else"):
        swap(other, verify={"ids": IDS})
    assert "forward" not in other.norm.__dict__
    assert other.mlp.training and not other.norm.training


def test_unknown_kinds_are_refused():
    with pytest.raises(KernelError, match="unknown kind"):
        swap(build(), kinds=["norms"])


# -- logits --------------------------------------------------------------------------------------------------------


def soft_capped(logits):
    return torch.tanh(logits / 3.0) * 3.0


@pytest.mark.parametrize(
    "shape",
    [
        lambda logits: logits,
        lambda logits: logits.float(),
        lambda logits: logits * 0.25,
        lambda logits: logits / 4,
        soft_capped,
        lambda logits: soft_capped(logits * 2),
        lambda logits: soft_capped(logits) * 0.5,
    ],
)
@pytest.mark.parametrize(
    "loss",
    [
        shifted,
        lambda logits: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, VOCAB), IDS.view(-1)),
        lambda logits: F.cross_entropy(
            logits[..., 1:, :].reshape(-1, VOCAB), IDS[:, 1:].reshape(-1), reduction="sum"
        ),
    ],
)
def test_a_loss_of_logits_never_forms_them(shape, loss):
    model, twin, seen = build(shape), build(shape), []
    swap(model)

    def watched(logits):
        seen.append(logits)
        return loss(logits)

    assert_trains_alike(
        model, twin, lambda logits: (watched if type(logits).__name__ == "Logits" else loss)(logits)
    )
    assert len(seen) == 1 and seen[0].formed is None


def test_a_scale_is_one_of_the_bias_too():
    """The layer's input times a factor is not its logits times the factor where it has a bias."""
    pair = []
    for _ in range(2):
        model = build(lambda logits: logits * 0.25)
        model.head = nn.Linear(WIDTH, VOCAB)
        pair.append(model)
    pair[1].load_state_dict(pair[0].state_dict())
    swap(pair[0])
    assert_trains_alike(*pair)


def by_somebody_else(model):
    """The output layer as ranks have it: computed by a method that somebody has put there."""

    def run_products(self, products, x):
        assert products is None
        return F.linear(x, self.weight, self.bias)

    model.head.run_products = types.MethodType(run_products, model.head)
    model.head.forward = types.MethodType(lambda self, x: self.run_products(None, x), model.head)


@pytest.mark.parametrize("shape", [lambda logits: logits, lambda logits: logits * 0.25, soft_capped])
def test_logits_of_a_layer_that_somebody_else_computes_wait_for_a_question(shape):
    model, twin, asked, heard = build(shape), build(shape), [], []
    by_somebody_else(model)
    assert defer_logits(model) is None

    def hook(_):
        heard.append(model.head.weight.grad is None)

    hook.__module__ = "cai_zero.stage3"  # one that gathers weights, and looks at no logits

    def question(head, x, softcap):
        asked.append((head, softcap))
        logits = F.linear(x, head.weight)
        return (logits if softcap is None else softcap * torch.tanh(logits / softcap)).logsumexp(-1)

    def loss(logits):
        if type(logits) is not Logits:
            return logits.flatten(0, 1)[3:9].logsumexp(-1).sum()
        logits.register_hook(hook)
        chosen = logits.flatten(0, 1)[3:9]
        answer = chosen.answer(question)
        assert logits.pending() and chosen.pending()
        return answer.sum()

    assert_trains_alike(model, twin, loss)
    assert asked == [(model.head, 3.0 if shape is soft_capped else None)] and heard == [True]


def test_logits_that_need_be_are_formed_all_the_same():
    """A cross-entropy of a part of the columns is not the kernel's; beside a bias no factor is the input's."""
    model, twin = build(), build()
    by_somebody_else(model)
    defer_logits(model)
    assert_trains_alike(model, twin)
    assert type(model.eval()(IDS)) is torch.Tensor
    other = build(lambda logits: logits * 0.25)
    other.head = nn.Linear(WIDTH, VOCAB)
    by_somebody_else(other)
    defer_logits(other)
    assert other(IDS).answer(lambda *_: pytest.fail("it was asked")) is None


def test_layers_whose_logits_do_not_wait():
    model = build()
    assert "computed by torch" in defer_logits(model)
    model.head = nn.Sequential(nn.Linear(WIDTH, VOCAB))
    assert "Sequential" in defer_logits(model)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: F.log_softmax(logits, -1).square().mean(),
        lambda logits: F.cross_entropy(logits.transpose(1, 2), IDS),
        lambda logits: (logits[0] @ logits[1].T).sum() + logits.argmax(-1).sum(),
        lambda logits: F.cross_entropy(
            logits.flatten(0, 1), IDS.flatten(), weight=torch.arange(VOCAB).float()
        ),
        lambda logits: torch.cat([logits, logits], 1)[..., None].mean(),
        lambda logits: torch.tanh(torch.tanh(logits)).sum(),
        lambda logits: logits.mul_(2).sum() + logits.sum(),
    ],
)
def test_other_uses_form_them(loss):
    model, twin = build(), build()
    swap(model)
    assert_trains_alike(model, twin, loss)


def test_logits_say_what_they_are():
    model = build()
    swap(model)
    logits = model(IDS)
    assert logits.shape == (3, 7, VOCAB) and logits.dtype == torch.float32 and logits.requires_grad
    assert len(logits) == 3 and logits.ndim == 3 and logits.numel() == 3 * 7 * VOCAB and logits.formed is None
    with torch.no_grad():
        assert logits.argmax(-1).shape == (3, 7)
    assert logits.formed.requires_grad  # what is written into them counts for a loss too
    logits.sum().backward()
    assert model.head.weight.grad is not None


def test_a_loss_keeps_no_hidden_states():
    """The fused layer has their gradient by then; they would lie beside every gradient of the backward."""
    model = build()
    swap(model)
    logits = model(IDS).flatten(0, 1)
    hidden = weakref.ref(logits.hidden)
    loss = F.cross_entropy(logits, IDS.flatten())
    del logits
    assert hidden() is None and loss.requires_grad


@pytest.mark.parametrize("loss", [shifted, lambda logits: logits.square().mean()])
def test_hooks_on_logits_hear_of_the_backward(loss):
    """Before any gradient of the output layer exists; a removed one hears nothing."""
    model, heard = build(), []
    swap(model)
    logits = model(IDS)
    logits.register_hook(lambda _: heard.append(model.head.weight.grad is None))
    logits.register_hook(lambda _: heard.append("removed")).remove()
    loss(logits).backward()
    assert heard == [True]


def test_outside_training_logits_are_plain():
    model = build()
    swap(model)
    assert type(model.eval()(IDS)) is torch.Tensor


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros(x.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy


def test_a_gradient_is_never_lost():
    model = build()
    swap(model)
    with pytest.raises(RuntimeError, match="never formed"):
        Double.apply(model(IDS)).sum().backward()


def test_heads_that_are_no_linear_layer_are_left():
    model = build()
    model.head = nn.Sequential(nn.Linear(WIDTH, VOCAB))
    assert ["Sequential" in k.reason for k in swap(model).kept] == [True]


def test_a_swapped_model_compiles_in_one_graph():
    model, twin = build(), build()
    swap(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_trains_alike(
        model, twin, lambda _: shifted(compiled(IDS) if _.__class__.__name__ == "Logits" else _)
    )
