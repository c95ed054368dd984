"""Tokens to their experts and back: the order, the sums and their gradients, dropped choices, empty experts."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES

from cai_kernels import KernelError, token_permute, token_unpermute
from cai_kernels.testing import assert_no_less_exact
from cai_kernels.token_permute import reference

CASES = [  # tokens, columns, choices, experts
    (5, 123, 2, 4),
    (1, 64, 1, 1),
    (7, 1, 3, 9),
    (0, 16, 2, 3),
    (140, 8, 2, 5),
    (33, 40, 8, 70),
]


def routing(tokens, choices, experts, *, ids=torch.int64):
    """Choices that drop some tokens (-1, or `experts` as a sentinel) and leave one expert empty."""
    random = torch.Generator().manual_seed(tokens + experts)
    chosen = torch.randint(-1, experts + 1, (tokens, choices), generator=random)
    if experts > 2:
        chosen[chosen == 1] = 0
    return chosen.to(DEVICE, ids)


def by_hand(expert_ids, experts):
    """The rows of each expert, in the order a loop over choices meets them."""
    rows = [[] for _ in range(experts + 1)]
    for choice, e in enumerate(expert_ids.reshape(-1).tolist()):
        rows[e if 0 <= e < experts else experts].append(choice)
    return rows


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", CASES)
def test_rows_stand_by_expert_in_the_order_of_tokens(case, ids, backend):
    tokens, columns, choices, experts = case
    expert_ids = routing(tokens, choices, experts, ids=ids)
    x = torch.randn(tokens, columns, device=DEVICE)
    permuted, offsets, index = token_permute(x, expert_ids, experts, backend=backend)
    rows = by_hand(expert_ids, experts)
    ends = torch.tensor([0] + [len(r) for r in rows[:-1]]).cumsum(0)
    assert offsets.dtype == index.dtype == torch.int32
    assert offsets.tolist() == ends.tolist()
    flat = [choice for r in rows for choice in r]
    kept = int(ends[-1])
    assert torch.equal(permuted[:kept], x[[choice // choices for choice in flat[:kept]]])
    assert not permuted[kept:].any()
    expected = torch.empty(tokens * choices, dtype=torch.int64)
    for row, choice in enumerate(flat):
        expected[choice] = row if row < kept else -1 - row
    assert index.reshape(-1).tolist() == expected.tolist()


@pytest.mark.parametrize("held", [0, 1024])
def test_more_choices_than_one_scan_of_the_counts_takes(held, monkeypatch):
    from cai_kernels.token_permute import triton

    expert_ids = torch.randint(0, 3, (400, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    monkeypatch.setattr(triton, "CHOICES_EACH", 32)
    monkeypatch.setattr(triton, "COUNTS_EACH", 8)
    monkeypatch.setattr(triton, "COUNTS_HELD", held)
    index, offsets = triton.expert_order(expert_ids, 3)
    expected, ends = reference.expert_order(expert_ids, 3)
    assert torch.equal(index, expected) and torch.equal(offsets, ends)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_error_is_no_larger_than_eager(case, dtype):
    tokens, columns, choices, experts = case
    expert_ids = routing(tokens, choices, experts)
    index, _ = reference.expert_order(expert_ids, experts)
    random = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, columns, generator=random).to(DEVICE, dtype)
    y = torch.randn(tokens * choices, columns, generator=random).to(DEVICE, dtype)
    weights = torch.rand(tokens, choices, generator=random).to(DEVICE, dtype)

    def permute(x):
        flat = expert_ids.reshape(-1)
        kept = (flat >= 0) & (flat < experts)
        order = torch.argsort(torch.where(kept, flat, experts), stable=True)
        return x[order // choices] * kept[order, None].to(x.dtype)

    def unpermute(y, weights):
        rows = torch.where(index < 0, 0, index).long()
        kept = (index >= 0)[..., None].to(y.dtype)
        return (y[rows] * kept * weights[..., None]).sum(1) if y.numel() else y.new_zeros(tokens, columns)

    assert_no_less_exact(
        lambda x: token_permute(x, expert_ids, experts, backend="triton")[0], permute, [x], [y]
    )
    assert_no_less_exact(
        lambda y, w: token_unpermute(y, index, w, backend="triton"), unpermute, [y, weights], [x]
    )
    assert_no_less_exact(
        lambda y: token_unpermute(y, index, backend="triton"),
        lambda y: unpermute(y, torch.ones_like(weights)),
        [y],
        [x],
    )


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("spare", [0, 3])
def test_rows_of_dropped_choices_may_be_left_out(backend, spare):
    tokens, columns, choices, experts = 33, 40, 8, 70
    expert_ids = routing(tokens, choices, experts)
    kept = int(((expert_ids >= 0) & (expert_ids < experts)).sum())
    x = torch.randn(tokens, columns, device=DEVICE, requires_grad=True)
    weights = torch.rand(tokens, choices, device=DEVICE, requires_grad=True)
    upstream = torch.randn(tokens, columns, device=DEVICE)

    def there_and_back(rows):
        permuted, offsets, index = token_permute(x, expert_ids, experts, rows=rows, backend=backend)
        assert len(permuted) == (expert_ids.numel() if rows is None else rows)
        gradients = []
        for given in (None, weights, weights.detach()):
            out = token_unpermute(permuted, index, given, backend=backend)
            leaves = (x,) if given is not weights else (x, weights)
            gradients += [out, *torch.autograd.grad(out, leaves, upstream, retain_graph=True)]
        return [permuted[:kept], offsets, index, *gradients]

    whole, parts = there_and_back(None), there_and_back(kept + spare)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_weights_may_be_wider_than_tokens():
    expert_ids = routing(9, 2, 4)
    y = torch.randn(18, 24, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(9, 2, device=DEVICE, requires_grad=True)
    index, _ = reference.expert_order(expert_ids, 4)
    dout = torch.randn(9, 24, device=DEVICE, dtype=torch.bfloat16)
    ours = token_unpermute(y, index, weights, backend="triton")
    theirs = token_unpermute(y, index, weights, backend="reference")
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours, (y, weights), dout),
        torch.autograd.grad(theirs, (y, weights), dout),
        strict=True,
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def test_only_the_gradients_that_are_asked_for():
    index, _ = reference.expert_order(routing(6, 2, 3), 3)
    y, weights = torch.randn(12, 8, device=DEVICE), torch.rand(6, 2, device=DEVICE)
    dout = torch.randn(6, 8, device=DEVICE)
    both = torch.autograd.grad(
        token_unpermute(y.requires_grad_(), index, weights.requires_grad_(), backend="triton"),
        (y, weights),
        dout,
    )
    (dy,) = torch.autograd.grad(token_unpermute(y, index, weights.detach(), backend="triton"), y, dout)
    (dw,) = torch.autograd.grad(token_unpermute(y.detach(), index, weights, backend="triton"), weights, dout)
    assert torch.equal(dy, both[0]) and torch.equal(dw, both[1])


def test_strided_inputs_and_the_same_run_twice():
    expert_ids = routing(50, 2, 6)
    wide = torch.randn(50, 20, 2, device=DEVICE)
    first = token_permute(wide[..., 0], expert_ids.t().contiguous().t(), 6, backend="triton")
    second = token_permute(wide[..., 0].contiguous(), expert_ids, 6, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_reference_gradients():
    expert_ids = routing(4, 2, 3)
    x = torch.randn(4, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y = torch.randn(8, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    _, _, index = token_permute(x, expert_ids, 3, backend="reference")
    assert torch.autograd.gradcheck(lambda x: token_permute(x, expert_ids, 3, backend="reference")[0], x)
    assert torch.autograd.gradcheck(
        lambda y, w: token_unpermute(y, index, w, backend="reference"), (y, weights)
    )


def test_there_and_back():
    x = torch.randn(12, 16, device=DEVICE)
    expert_ids = torch.stack([torch.randperm(5)[:2] for _ in range(12)]).to(DEVICE)
    permuted, _, index = token_permute(x, expert_ids, 5)
    halves = torch.full((12, 2), 0.5, device=DEVICE)
    torch.testing.assert_close(token_unpermute(permuted, index, halves), x)


def test_the_ops_are_clean_for_the_compiler():
    from cai_kernels.token_permute import triton

    expert_ids = routing(6, 2, 3)
    x = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    weights = torch.rand(6, 2, device=DEVICE, requires_grad=True)
    index, _ = reference.expert_order(expert_ids, 3)
    y = torch.randn(12, 8, device=DEVICE, requires_grad=True)
    torch.library.opcheck(triton.expert_order, (expert_ids, 3))
    torch.library.opcheck(triton.token_spread, (x, index, 12))
    torch.library.opcheck(triton.token_collect, (y, index, weights))
    torch.library.opcheck(triton.token_collect, (y, index, None))

    def whole(x, weights, backend):
        permuted, _, index = token_permute(x, expert_ids, 3, backend=backend)
        return token_unpermute(permuted * 2, index, weights, backend=backend)

    for backend in ("triton", "reference"):
        compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, weights, backend), whole(x, weights, backend))


def test_errors_name_the_argument():
    x, expert_ids = torch.randn(4, 8, device=DEVICE), routing(4, 2, 3)
    _, _, index = token_permute(x, expert_ids, 3)
    y = torch.randn(8, 8, device=DEVICE)
    with pytest.raises(KernelError, match="expert_ids does not fit x"):
        token_permute(x, expert_ids[:3], 3)
    with pytest.raises(KernelError, match="expert_ids has an unsupported dtype"):
        token_permute(x, expert_ids.float(), 3)
    with pytest.raises(KernelError, match="n_experts must be positive"):
        token_permute(x, expert_ids, 0)
    with pytest.raises(KernelError, match="rows does not fit expert_ids"):
        token_permute(x, expert_ids, 3, rows=9)
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        token_permute(x.double(), expert_ids, 3, backend="triton")
    with pytest.raises(KernelError, match="does not take this shape"):
        token_permute(x, expert_ids, 5000, backend="triton")
    with pytest.raises(KernelError, match="index does not fit y"):
        token_unpermute(y.repeat(2, 1), index)
    with pytest.raises(KernelError, match="weights does not fit index"):
        token_unpermute(y, index, torch.ones(4, 3, device=DEVICE))
    with pytest.raises(KernelError, match="weights is on another device"):
        token_unpermute(y, index, torch.ones(4, 2, device="meta"))
    with pytest.raises(KernelError, match="float64 weights"):
        token_unpermute(y, index, torch.ones(4, 2, device=DEVICE).double(), backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_elements_than_32_bits_count():
    tokens, columns, choices = 2**17, 4096, 5
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    expert_ids = torch.randint(0, 8, (tokens, choices), device="cuda")
    permuted, _, index = token_permute(x, expert_ids, 8)
    assert permuted.numel() > 2**31
    out = token_unpermute(permuted, index)
    torch.testing.assert_close(out[-64:], x[-64:] * choices)
