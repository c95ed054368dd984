"""`swap(kinds=["experts"])` finds layers of experts by what they compute, and leaves those that compute more."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cai_kernels import swap
from cai_kernels.swap import expert_kernels

EXPERTS, WIDE, INNER, TOKENS, CHOICES = 6, 8, 12, 15, 3


class Experts(nn.Module):
    """As transformers builds nearly all: [E, 2 I, D] and [E, D, I]."""

    turned, biased, columns = True, False, 2 * INNER

    def __init__(self, act: nn.Module | None = None):
        super().__init__()
        self.num_experts, self.hidden_dim = EXPERTS, WIDE
        shapes = {"gate_up_proj": (self.columns, WIDE), "down_proj": (WIDE, INNER)}
        for place, (name, (rows, columns)) in enumerate(shapes.items()):
            random = torch.Generator().manual_seed(place)
            shape = (rows, columns) if self.turned else (columns, rows)
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape, generator=random) * 0.4))
            if self.biased:
                bias = nn.Parameter(torch.randn(EXPERTS, rows, generator=random))
                self.register_parameter(f"{name}_bias", bias)
        self.act_fn = act or nn.SiLU()

    def gated(self, hidden):
        gate, up = hidden.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def one(self, x, expert):
        return F.linear(self.gated(F.linear(x, self.gate_up_proj[expert])), self.down_proj[expert])

    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, choices = torch.where(top_k_index == expert)
            out = self.one(hidden_states[tokens], expert) * top_k_weights[tokens, choices, None]
            total = total.index_add(0, tokens, out.to(total.dtype))
        return total


class Columns(Experts):
    """As Aria: [E, D, 2 I] and [E, I, D]."""

    turned = False

    def one(self, x, expert):
        return self.gated(x @ self.gate_up_proj[expert]) @ self.down_proj[expert]


class Clamped(Columns):
    """As gpt-oss: with biases, halves that alternate, and a clamped gate."""

    biased = True

    def __init__(self):
        super().__init__()
        self.limit, self.alpha = 1.5, 1.702

    def gated(self, hidden):
        gate, up = hidden[..., ::2].clamp(max=self.limit), hidden[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def one(self, x, expert):
        hidden = self.gated(x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert])
        return hidden @ self.down_proj[expert] + self.down_proj_bias[expert]


class Plain(Experts):
    """As Nemotron-H: one matrix before the activation, which is a square."""

    columns = INNER

    def __init__(self):
        super().__init__(Squared())

    def gated(self, hidden):
        return self.act_fn(hidden)


class Squared(nn.Module):
    def forward(self, x):
        return x.relu().square()


class Named(Experts):
    """With a gate of its own, of a method that has a name in transformers."""

    gated = None  # type: ignore[assignment]

    def _apply_gate(self, hidden):
        gate, up = hidden.chunk(2, dim=-1)
        return F.softplus(gate) * up.tanh()

    def one(self, x, expert):
        return F.linear(self._apply_gate(F.linear(x, self.gate_up_proj[expert])), self.down_proj[expert])


KINDS = {
    "silu": Experts,
    "gelu": lambda: Experts(nn.GELU()),
    "gelu_tanh": lambda: Experts(nn.GELU(approximate="tanh")),
    "columns": Columns,
    "clamped": Clamped,
    "act_fn": Plain,
    "_apply_gate": Named,
}
NAMES = {"columns": "silu"}


class Model(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)


def arguments(dtype=torch.float64):
    random = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, WIDE, generator=random, dtype=torch.float64)
    ids = torch.rand(TOKENS, EXPERTS - 1, generator=random).topk(CHOICES).indices
    return x.to(dtype), ids, torch.rand(TOKENS, CHOICES, generator=random, dtype=torch.float64).to(dtype)


def results(model, x, ids, weights):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = model(x, ids, weights)
    leaves = [x, weights, *model.parameters()]
    return [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaves)]


def assert_equal(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_layer_computes_the_same_by_kernels(kind):
    model = Model(KINDS[kind]()).double()
    wanted = results(model, *arguments())
    state = torch.random.get_rng_state()
    swapped = swap(model, kinds=["experts"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [entry.kernel for entry in swapped.replaced] == [f"expert_layer({NAMES.get(kind, kind)})"]
    assert_equal(results(model, *arguments()), wanted, 1e-10)
    swapped.undo()
    assert "forward" not in vars(model.experts)


@pytest.mark.parametrize("kind", ["silu", "clamped", "act_fn"])
def test_and_by_triton(kind):
    model = Model(KINDS[kind]())
    wanted = results(model, *arguments(torch.float32))
    assert swap(model, kinds=["experts"], backend="triton").replaced
    assert_equal(results(model, *arguments(torch.float32)), wanted, 1e-4)


def test_a_layer_on_the_meta_device_is_known():
    with torch.device("meta"):
        model = Model(Clamped())
    assert swap(model, kinds=["experts"]).replaced
    assert all(param.is_meta for param in model.parameters())


class Limited(Experts):
    """Each expert takes so many tokens at most."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        most = -(-top_k_index.numel() // self.num_experts) + 1
        ids = top_k_index.clone()
        for expert in range(self.num_experts):
            late = (ids == expert).flatten().cumsum(0).view_as(ids) > most
            ids[(ids == expert) & late] = -1
        return super().forward(hidden_states, ids, top_k_weights)


class Noisy(Experts):
    def one(self, x, expert):
        return super().one(F.dropout(x, 0.5, self.training), expert)


class Scaled(Experts):
    def one(self, x, expert):
        return super().one(x, expert) * 1.01


class Normed(Experts):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)

    def one(self, x, expert):
        return self.norm(super().one(x, expert))


class Shared(Experts):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def one(self, x, expert):
        return super().one(x, expert) * self.scale


REASONS = {
    Limited: "computes something else",
    Noisy: "computes something else",
    Scaled: "computes something else",
    Normed: "its children have parameters",
    Shared: "its parameters are not two matrices",
}


@pytest.mark.parametrize("kind", list(REASONS), ids=lambda kind: kind.__name__)
def test_what_computes_more_is_left_and_says_so(kind):
    model = Model(kind())
    swapped = swap(model, kinds=["experts"])
    assert not swapped.replaced and "forward" not in vars(model.experts)
    (entry,) = swapped.kept
    assert (entry.name, entry.kind) == ("experts", "experts") and REASONS[kind] in entry.reason


def test_what_is_no_layer_of_experts_is_not_named():
    model = Model(nn.Bilinear(4, 5, 6))  # a parameter of three dimensions
    swapped = swap(model, kinds=["experts"])
    assert not swapped.replaced and not swapped.kept


def kernels_of(monkeypatch):
    """The calls of `expert_layer` from now on."""
    from cai_kernels.swap import expert_forms

    calls, kernel = [], expert_forms.expert_layer
    monkeypatch.setattr(expert_forms, "expert_layer", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    return calls


def test_a_layer_that_changes_runs_its_own_forward(monkeypatch):
    x, ids, weights = arguments(torch.float32)
    changes = {
        "nothing": lambda layer: None,
        "activation": lambda layer: setattr(layer, "act_fn", nn.Tanh()),
        "number": lambda layer: setattr(layer, "limit", 0.5),
        "hook": lambda layer: layer.act_fn.register_forward_hook(lambda m, a, y: y * 2),
        "dtype": lambda layer: layer.half(),
    }
    for name, change in changes.items():
        model = Model(Clamped() if name == "number" else Experts())
        plain = copy.deepcopy(model)
        assert swap(model, kinds=["experts"]).replaced
        for layer in (model.experts, plain.experts):
            change(layer)
        calls = kernels_of(monkeypatch)
        if name == "dtype":
            with pytest.raises(RuntimeError):
                model(x, ids, weights)  # as its own forward does
        else:
            torch.testing.assert_close(model(x, ids, weights), plain(x, ids, weights))
        assert bool(calls) == (name == "nothing")


def test_copies_keywords_and_graphs(monkeypatch):
    model = Model(Experts())
    x, ids, weights = arguments(torch.float32)
    wanted = model(x, ids, weights)
    swap(model, kinds=["experts"])
    twin, calls = copy.deepcopy(model), kernels_of(monkeypatch)
    with torch.no_grad():
        twin.experts.down_proj.zero_()
    assert not twin(x, ids, weights).any() and len(calls) == 1
    by_name = model.experts(x, top_k_weights=weights, top_k_index=ids)
    torch.testing.assert_close(by_name, wanted)
    assert len(calls) == 2
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_equal(results(compiled, x, ids, weights), results(model, x, ids, weights), 1e-5)


def test_kernels_for_who_runs_the_layers():
    """Two parts of a layer sum up to the whole: other ids are -1, and what is not known goes the other way."""
    ways = []

    def otherwise(layer, tokens, ids, weights, visits):
        ways.append(type(layer))
        return tokens

    x, ids, weights = arguments()
    model = Model(nn.Sequential(Clamped(), Scaled())).double()
    wanted = model.experts[0](x, ids, weights)
    maths = expert_kernels(model, otherwise)
    assert [entry.name for entry in maths.record.replaced] == ["experts.0"]
    assert [entry.name for entry in maths.record.kept] == ["experts.1"]
    total = torch.zeros_like(x)
    for first in (0, EXPERTS // 2):
        part, last = copy.deepcopy(model.experts[0]), first + EXPERTS // 2
        for name, param in part.named_parameters():
            setattr(part, name, nn.Parameter(param[first:last].clone()))
        part.num_experts = EXPERTS // 2
        part.forward = types.MethodType(lambda *_: None, part)
        own_ids = torch.where((ids >= first) & (ids < last), ids - first, -1)
        for visits in (None, int((own_ids >= 0).sum())):
            out = maths(part, x, own_ids, weights, visits)
        total += out
    torch.testing.assert_close(total, wanted)
    assert not ways
    assert maths(model.experts[1], x, ids, weights) is x and ways == [Scaled]
