"""A layer of experts: no less exact than a loop over experts, with every gradient, and nothing added by other ids."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE
from torch.nn import functional as F

from cai_kernels import AdaptedExperts, ExpertGate, KernelError, expert_layer
from cai_kernels.testing import assert_no_less_exact

TOKENS, WIDE, INNER, EXPERTS = 21, 24, 40, 4
PLAIN = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped": lambda gate, up: (
        (up.clamp(-2, 2) + 1) * gate.clamp(max=2) * torch.sigmoid(1.7 * gate.clamp(max=2))
    ),
}
GATES = [ExpertGate(kind, interleaved, 1.7, 2.0) for kind in PLAIN for interleaved in (False, True)]
"""The clamped one meets its limit in these tests."""


def inputs(dtype, *, biased, seed=0):
    """Tokens of whom some visit no expert, and experts of whom the last but one is visited by nobody."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=random) * scale).to(DEVICE, dtype)

    ids = torch.randint(-1, EXPERTS, (TOKENS, 3), generator=random)
    ids[ids == EXPERTS - 2] = EXPERTS
    ids[4] = -1
    x, weights = normal(TOKENS, WIDE), torch.rand(TOKENS, 3, generator=random).to(DEVICE, dtype)
    matrices = [normal(EXPERTS, WIDE, 2 * INNER, scale=0.3), normal(EXPERTS, INNER, WIDE, scale=0.2)]
    biases = [normal(EXPERTS, 2 * INNER), normal(EXPERTS, WIDE)] if biased else []
    return ids.to(DEVICE), [x, weights, *matrices, *biases]


def loop(gate, ids):
    """The layer by its words: an expert after the other, on the tokens that visit it."""

    def run(x, weights, up, down, up_bias=None, down_bias=None):
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(len(x), x.shape[1], dtype=wide, device=x.device)
        for e in range(len(up)):
            tokens, choices = torch.where(ids == e)
            hidden = x[tokens] @ up[e]
            hidden = hidden if up_bias is None else hidden + up_bias[e]
            halves = (hidden[:, ::2], hidden[:, 1::2]) if gate.interleaved else hidden.chunk(2, -1)
            out = PLAIN[gate.kind](*halves) @ down[e]
            out = out if down_bias is None else out + down_bias[e]
            total = total.index_add(0, tokens, out.to(wide) * weights[tokens, choices, None].to(wide))
        return total.to(x.dtype)

    return run


def ours(gate, ids, **options):
    def run(x, weights, up, down, up_bias=None, down_bias=None):
        return expert_layer(
            x, ids, weights, up, down, gate=gate, up_bias=up_bias, down_bias=down_bias, **options
        )

    return run


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_equals_a_loop_over_experts(gate, biased):
    ids, tensors = inputs(torch.float32, biased=biased)
    upstream = [torch.randn(TOKENS, WIDE, device=DEVICE)]
    floor = 64 * torch.finfo(torch.float32).eps * 32
    assert_no_less_exact(ours(gate, ids, backend="triton"), loop(gate, ids), tensors, upstream, floor=floor)


@pytest.mark.parametrize("gate", [GATES[0], GATES[-1]], ids=str)
def test_equals_a_loop_in_16_bits(gate):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter truncates to bfloat16
    ids, tensors = inputs(dtype, biased=True)
    upstream = [torch.randn(TOKENS, WIDE, device=DEVICE).to(dtype)]
    assert_no_less_exact(ours(gate, ids, backend="triton"), loop(gate, ids), tensors, upstream)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_the_form_in_parts_equals_a_loop_in_float64(gate):
    ids, tensors = inputs(torch.float64, biased=True)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    upstream = torch.randn(TOKENS, WIDE, dtype=torch.float64, device=DEVICE)
    got, wanted = ours(gate, ids, backend="reference")(*leaves), loop(gate, ids)(*leaves)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(out, leaves, upstream) for out in (got, wanted)), strict=True)
    for ours_, theirs in pairs:
        torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_any_function_stands_between_the_products(backend):
    ids, tensors = inputs(torch.float32, biased=True)

    def gate(hidden):
        first, last = hidden.chunk(2, -1)
        return F.silu(first) * last

    upstream = torch.randn(TOKENS, WIDE, device=DEVICE)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    outs = [ours(g, ids, backend=backend)(*leaves) for g in (gate, GATES[0])]
    for a, b in zip(*(torch.autograd.grad(out, leaves, upstream) for out in outs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("spare", [0, 5])
def test_rows_may_be_as_many_as_choices_that_count(backend, spare):
    ids, tensors = inputs(torch.float32, biased=True)
    rows = int(((ids >= 0) & (ids < EXPERTS)).sum()) + spare
    assert rows < ids.numel()
    leaves = [tensor.requires_grad_() for tensor in tensors]
    upstream = torch.randn(TOKENS, WIDE, device=DEVICE)
    outs = [ours(GATES[-1], ids, backend=backend, rows=n)(*leaves) for n in (None, rows)]
    torch.testing.assert_close(*outs)
    for a, b in zip(*(torch.autograd.grad(out, leaves, upstream) for out in outs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_tokens_that_visit_nobody_and_no_tokens(backend):
    ids, tensors = inputs(torch.float32, biased=True)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    nobody = torch.full_like(ids, -1)
    for count in (TOKENS, 0):
        cut = [leaves[0][:count], leaves[1][:count], *leaves[2:]]
        for rows in (None, 0):
            out = ours(GATES[0], nobody[:count], backend=backend, rows=rows)(*cut)
            assert out.shape == (count, WIDE) and not out.any()
            gradients = torch.autograd.grad(out.sum(), leaves, materialize_grads=True)
            assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_matrices_held_the_other_way_round(backend):
    ids, (x, weights, up, down) = inputs(torch.float32, biased=False)
    upstream, wanted = torch.randn(TOKENS, WIDE, device=DEVICE), None
    for turned in (False, True):
        leaves = [m.transpose(1, 2).contiguous() if turned else m.clone() for m in (up, down)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        matrices = [leaf.transpose(1, 2) if turned else leaf for leaf in leaves]
        gradients = torch.autograd.grad(
            ours(GATES[0], ids, backend=backend)(x, weights, *matrices), leaves, upstream
        )
        assert backend == "reference" or all(gradient.is_contiguous() for gradient in gradients)
        gradients = [gradient.transpose(1, 2) if turned else gradient for gradient in gradients]
        wanted = wanted or gradients
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_only_the_gradients_that_are_asked_for():
    ids, tensors = inputs(torch.float32, biased=True)
    upstream = torch.randn(TOKENS, WIDE, device=DEVICE)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    run = ours(GATES[0], ids, backend="triton")
    wanted = torch.autograd.grad(run(*leaves), leaves, upstream)
    for place in range(len(tensors)):
        arguments = [leaf if i == place else leaf.detach() for i, leaf in enumerate(leaves)]
        (gradient,) = torch.autograd.grad(run(*arguments), leaves[place], upstream)
        torch.testing.assert_close(gradient, wanted[place])


def test_rows_longer_than_a_step(monkeypatch):
    from cai_kernels.experts import triton

    ids, tensors = inputs(torch.float32, biased=True)
    monkeypatch.setattr(triton, "BLOCK", 16)
    assert triton._block(INNER) == (8, 1)
    upstream = [torch.randn(TOKENS, WIDE, device=DEVICE)]
    floor = 64 * torch.finfo(torch.float32).eps * 32
    run = ours(GATES[-1], ids, backend="triton")
    assert_no_less_exact(run, loop(GATES[-1], ids), tensors, upstream, floor=floor)


def test_weights_may_be_wider_than_tokens():
    ids, (x, weights, up, down) = inputs(torch.bfloat16, biased=False)
    wide = [weights.float().requires_grad_(), x.requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in wide]
    upstream = torch.randn(TOKENS, WIDE, device=DEVICE).bfloat16()
    wanted = loop(GATES[0], ids)(exact[1], exact[0], up.double(), down.double())
    out = ours(GATES[0], ids, backend="triton")(wide[1], wide[0], up, down)
    gradients = torch.autograd.grad(out, wide, upstream)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16]
    exact_gradients = torch.autograd.grad(wanted, exact, upstream.double())
    for a, b in zip((out, *gradients), (wanted, *exact_gradients), strict=True):
        assert (a.double() - b).abs().max() <= 2**-5 * b.abs().max()  # the interpreter rounds toward zero


def test_little_is_kept_for_backward():
    ids, tensors = inputs(torch.float32, biased=False)
    leaves, kept = [tensor.requires_grad_() for tensor in tensors], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(GATES[0], ids, backend="triton")(*leaves)
    large = [t for t in kept if t.numel() >= ids.numel() * WIDE and t.dim() == 2]
    assert [tuple(t.shape) for t in large] == [(ids.numel(), 2 * INNER)]


def test_one_graph_and_clean_operators():
    from cai_kernels.experts import triton

    ids, tensors = inputs(torch.float32, biased=True)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    upstream = torch.randn(TOKENS, WIDE, device=DEVICE)
    for gate in (GATES[0], GATES[-1]):
        run = ours(gate, ids, backend="triton")
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        outs = [run(*leaves), compiled(*leaves)]
        torch.testing.assert_close(*outs)
        for a, b in zip(*(torch.autograd.grad(out, leaves, upstream) for out in outs), strict=True):
            torch.testing.assert_close(a, b)
    hidden, by_row = torch.randn(6, 10, device=DEVICE), torch.rand(6, device=DEVICE)
    bias, expert = torch.randn(2, 10, device=DEVICE), torch.zeros(6, dtype=torch.int32, device=DEVICE)
    options = ("clamped", True, 1.7, 2.0)
    torch.library.opcheck(triton.expert_gate, (hidden, by_row, bias, expert, *options))
    dout = torch.randn(6, 5, device=DEVICE)
    torch.library.opcheck(triton.expert_gate_backward, (dout, hidden, by_row, bias, expert, *options))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(triton.sums_by_expert, (hidden, offsets))


def test_errors_name_the_argument():
    ids, (x, weights, up, down) = inputs(torch.float32, biased=False)
    bad = {
        "ids or weights do not fit tokens": (x, ids[:3], weights, up, down),
        "up or down do not fit tokens": (x, ids, weights, up.transpose(1, 2), down),
        "up and down do not fit a gate": (x, ids, weights, up[..., :-1], down),
        "ids has an unsupported dtype": (x, ids.float(), weights, up, down),
        "down has an unsupported dtype": (x, ids, weights, up, down.double()),
    }
    for message, arguments in bad.items():
        with pytest.raises(KernelError, match=message):
            expert_layer(*arguments)
    with pytest.raises(KernelError, match="down_bias does not fit"):
        expert_layer(x, ids, weights, up, down, down_bias=torch.zeros(EXPERTS, WIDE + 1, device=DEVICE))
    with pytest.raises(KernelError, match="rows does not fit"):
        expert_layer(x, ids, weights, up, down, rows=ids.numel() + 1)


def test_by_the_grouped_product_of_torch(monkeypatch):
    """As on a Hopper GPU: torch multiplies, forward and backward, matrices that are held either way round."""
    from cai_kernels.experts import function
    from cai_kernels.grouped_matmul import torch_kernel

    monkeypatch.setattr(torch_kernel, "fast", lambda device: True)
    monkeypatch.setattr(function, "choose", lambda backend, device: "triton")
    calls, product = [], torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: calls.append(1) or product(*a, **k))
    ids, tensors = inputs(torch.bfloat16, biased=True)
    upstream = [torch.randn(TOKENS, WIDE, device=DEVICE).bfloat16()]
    for turned in (False, True):
        leaves = [*tensors]
        if turned:
            leaves[2:4] = [matrix.transpose(1, 2).contiguous().transpose(1, 2) for matrix in tensors[2:4]]
        run = ours(GATES[-1], ids, backend="auto")
        assert_no_less_exact(run, loop(GATES[-1], ids), leaves, upstream, slack=1.5)
    assert len(calls) == 2 * 6


def adapters(up, down, rank=3):
    """Low-rank matrices for both products, of no symmetry, and what they add to the matrices of the experts."""
    random = torch.Generator().manual_seed(5)
    pairs, sums = [], []
    for weight, scale in ((up, 0.5), (down, 2.0)):
        experts, width_in, width_out = weight.shape
        shapes = ((experts, rank, width_in), (experts, width_out, rank))
        first, second = (torch.randn(shape, generator=random).to(weight) for shape in shapes)
        pairs.append((first.requires_grad_(), second.requires_grad_(), scale))
        sums.append(weight + scale * (second @ first).transpose(1, 2))
    return pairs, sums


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("gate", [GATES[0], GATES[-1]], ids=str)
def test_adapters_are_sums_of_matrices(gate, backend):
    dtype, close = (torch.float64, 1e-10) if backend == "reference" else (torch.float32, 2e-4)
    ids, (tokens, weights, up, down, *biases) = inputs(dtype, biased=True)
    pairs, sums = adapters(up, down)
    tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
    leaves = [tokens, weights, *(matrix for pair in pairs for matrix in pair[:2])]
    options = {"gate": gate, "up_bias": biases[0], "down_bias": biases[1], "backend": backend}
    beside = (AdaptedExperts(weight, *pair) for weight, pair in zip((up, down), pairs, strict=True))
    got = expert_layer(tokens, ids, weights, *beside, **options)
    wanted = expert_layer(tokens, ids, weights, *sums, **options)
    upstream = torch.randn(TOKENS, WIDE, device=DEVICE, dtype=dtype)
    torch.testing.assert_close(got, wanted, rtol=close, atol=close)
    results = (torch.autograd.grad(out, leaves, upstream) for out in (got, wanted))
    for ours_, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours_, theirs, rtol=close, atol=close * float(theirs.abs().max()))


def test_adapters_beside_one_product_alone_and_of_other_shapes():
    ids, (tokens, weights, up, down) = inputs(torch.float64, biased=False)
    pairs, sums = adapters(up, down)
    got = expert_layer(tokens, ids, weights, up, AdaptedExperts(down, *pairs[1]))
    torch.testing.assert_close(got, expert_layer(tokens, ids, weights, up, sums[1]), rtol=1e-10, atol=1e-10)
    with pytest.raises(KernelError, match="the adapters of up do not fit"):
        expert_layer(tokens, ids, weights, AdaptedExperts(up, *pairs[1]), down)
    narrow = AdaptedExperts(down, pairs[1][0].float(), pairs[1][1])
    with pytest.raises(KernelError, match=r"down\.first"):
        expert_layer(tokens, ids, weights, up, narrow)
