"""Norms, activations and rotations whose code has more to it, or that are used in other ways: as their plain twins."""

from __future__ import annotations

import copy
import pickle

import pytest
import swap_layers
import torch
from swap_layers import (
    ODD,
    WIDTH,
    Dropping,
    GatedFirst,
    GatedLast,
    Llama,
    Mlp,
    Rotary,
    Scaled,
    ScaledMlp,
    Wide,
    draw,
    linear,
)
from torch import nn

from cai_kernels import swap


def change(name, value):
    """Sets an attribute, and runs."""

    def use(module):
        vars(module)[name] = value
        return module(draw(3, WIDTH))

    return use


def modes(module):
    results = []
    for training in (True, False, True):
        torch.manual_seed(3)
        results.append(module.train(training)(draw(3, WIDTH)))
    return results


def ranges(module):
    return [
        module(draw(2, n, WIDTH) * scale)
        for n, scale in ((1, 1e-4), (40, 1.0), (3, 300.0), (2, 1e6), (900, 1.0))
    ]


def gradients(module):
    x = draw(2, 3, WIDTH).requires_grad_()
    y = module(x * 1)
    if not y.requires_grad:
        return [y]
    try:
        y.square().sum().backward()
    except RuntimeError:  # it has written into what its backward needs
        return [y]
    return [g for g in (x.grad, *(p.grad for p in module.parameters())) if g is not None]


def penalty(module):
    x = draw(2, WIDTH).requires_grad_()
    (g,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
    (g.square().sum() + module(x).sum()).backward()
    return [g for g in (x.grad, *(p.grad for p in module.parameters())) if g is not None]


def dtypes(module):
    results = []
    for of_module in (torch.float32, torch.bfloat16, torch.float64):
        module.to(of_module)
        for of_x in (torch.float32, torch.bfloat16, torch.float64):
            try:
                results.append(module(draw(3, WIDTH).to(of_x)))
            except RuntimeError:
                results.append(torch.zeros(()))
    return results


def autocast(module):
    with torch.autocast("cpu", torch.bfloat16):
        return [module(draw(3, WIDTH)), module(draw(3, WIDTH).bfloat16())]


def shapes(module):
    x = draw(4, 6, WIDTH)
    return [module(v) for v in (x[0, 0], x[::2, ::3], x.transpose(0, 1), x[:0], x.expand(2, 4, 6, WIDTH))]


def replaced_weights(module):
    for name, param in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, nn.Parameter(param.detach() * 2))
    return module(draw(3, WIDTH))


def assigned(module):
    module.load_state_dict({n: p * 3 for n, p in module.state_dict().items()}, assign=True)
    return module(draw(3, WIDTH))


def called_with_others(module):
    others = {n: p.detach() + 1 for n, p in module.named_parameters()}
    return [torch.func.functional_call(module, others, (draw(3, WIDTH),)), module(draw(3, WIDTH))]


def copied(module):
    other = copy.deepcopy(module)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    return [other(draw(3, WIDTH)), module(draw(3, WIDTH)), pickle.loads(pickle.dumps(module))(draw(3, WIDTH))]


def transforms(module):
    x = draw(4, 3, WIDTH)
    return [torch.vmap(module)(x), torch.func.grad(lambda v: module(v).square().sum())(x)]


def frozen(module):
    module.requires_grad_(False)
    x = draw(3, WIDTH).requires_grad_()
    (g,) = torch.autograd.grad(module(x).square().sum(), x)
    with torch.no_grad():
        return [g, module(x)]


USES = [
    modes, ranges, gradients, penalty, dtypes, autocast, shapes, replaced_weights, assigned, called_with_others,
    copied, transforms, frozen,
]  # fmt: skip
SOUND = {"llama": Llama, "layer_norm": linear(nn.LayerNorm), "silu": Mlp, "gelu": lambda: Mlp(nn.GELU())}


def assert_as_plain(build, use, replaced=None):
    torch.manual_seed(0)
    plain = build()
    swapped = copy.deepcopy(plain)
    record = swap(nn.Sequential(swapped))
    if replaced is not None:
        assert bool(record.replaced) is replaced, str(record)
        assert replaced or all(kept.reason for kept in record.kept)
    torch.manual_seed(1)
    want = use(plain)
    torch.manual_seed(1)
    got = use(swapped)
    for a, b in zip(*((r if isinstance(r, (list, tuple)) else [r]) for r in (got, want)), strict=True):
        assert a.requires_grad == b.requires_grad
        close = {torch.bfloat16: 2**-6}.get(b.dtype, 2e-5)
        torch.testing.assert_close(
            a, b, rtol=close, atol=close * max(1.0, float(b.detach().abs().max()) if b.numel() else 0)
        )


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("name", list(SOUND))
def test_sound_modules_are_replaced_and_stay_right(name, use):
    assert_as_plain(SOUND[name], use, replaced=True)


@pytest.mark.parametrize("use", [modes, ranges, gradients], ids=lambda use: use.__name__)
@pytest.mark.parametrize("name", list(ODD))
def test_what_depends_on_more_is_left(name, use):
    assert_as_plain(ODD[name], use, replaced=False)


CHANGED = {
    "epsilon": (Llama, change("variance_epsilon", 0.3)),
    "epsilon a whole number": (Llama, change("variance_epsilon", 1)),
    "scale of a norm": (Scaled, change("scale", 3.0)),
    "scale of an MLP": (ScaledMlp, change("scale", 3.0)),
    "a branch by attribute": (ScaledMlp, change("twice", True)),
    "approximate": (
        lambda: Mlp(nn.GELU()),
        lambda m: [setattr(m.act, "approximate", "tanh"), m(draw(3, WIDTH))][1],
    ),
    "another activation": (Mlp, lambda m: [setattr(m, "act", nn.ReLU()), m(draw(3, WIDTH))][1]),
    "a hook on the activation": (
        Mlp,
        lambda m: [m.act.register_forward_hook(lambda *given: given[2] * 3), m(draw(3, WIDTH))][1],
    ),
    "keywords": (Llama, lambda m: m(hidden_states=draw(3, WIDTH))),
    "keywords of an MLP": (Mlp, lambda m: m(x=draw(3, WIDTH))),
    "one column": (Llama, lambda m: m(draw(3, 1))),
    "a wide activation": (Wide, lambda m: m(draw(3, WIDTH))),
    "dropout inside": (Dropping, modes),
}


@pytest.mark.parametrize("name", list(CHANGED))
def test_what_changes_later_counts(name):
    build, use = CHANGED[name]
    assert_as_plain(build, use, replaced=True)


@pytest.mark.parametrize("build", [GatedFirst, GatedLast], ids=["before", "after"])
def test_a_gate_is_heard(build):
    def use(module):
        x, gate = draw(3, WIDTH), draw(3, WIDTH) + 1
        return [module(x, gate), module(x, gate=gate), module(hidden_states=x, gate=gate)]

    assert_as_plain(build, use, replaced=False)


@pytest.mark.parametrize(
    "kind", ["plain", "decorated", "decorated by an object", "by length", "by value", "random"]
)
def test_rotations(kind):
    def use(module):
        q, k = draw(2, 4, 40, 8), draw(2, 2, 40, 8)
        return [t for n in (1, 7, 40) for t in module(q[:, :, :n], k[:, :, :n] * 100)]

    assert_as_plain(lambda: Rotary(kind), use, replaced=kind in ("plain", "decorated"))


def test_decorators_stay_around_a_rotation():
    module, q, k = Rotary("decorated"), draw(2, 4, 5, 8), draw(2, 2, 5, 8)
    want = module(q, k, form="double")
    swap(nn.Sequential(module))
    with torch.no_grad():
        torch.testing.assert_close(module(q, k, kind="double"), want)
        assert module(q.requires_grad_(), k)[0].requires_grad
    with pytest.raises(TypeError, match="other"):
        module(q, k, other=1)


@pytest.mark.parametrize("form", ["positional", "keyword", "uneven", "double", "mixed", "narrow keys"])
def test_rotations_called_in_other_ways(form):
    def use(module):
        dtype = torch.float64 if form == "double" else torch.float32
        q, k = draw(2, 4, 5, 8).to(dtype), draw(2, 2, 5, 8).to(dtype)
        k = k.bfloat16() if form == "narrow keys" else k
        return list(module(q, k, form))

    assert_as_plain(lambda: Rotary("plain"), use, replaced=True)


def test_the_functions_of_a_file_may_be_replaced_later(monkeypatch):
    module, q, k = Rotary("plain"), draw(2, 4, 5, 8), draw(2, 2, 5, 8)
    swap(nn.Sequential(module))
    monkeypatch.setattr(swap_layers, "rotate_plain", lambda q, k, cos, sin: (q * 2, k))
    torch.testing.assert_close(module(q, k)[0], q * 2)
