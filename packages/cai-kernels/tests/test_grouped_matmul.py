"""Grouped matmul: no less exact than a loop over experts, for any counts, strides and dtypes, and its gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES

from cai_kernels import KernelError, grouped_matmul
from cai_kernels.testing import assert_no_less_exact

CASES = [  # rows of each expert, rows of no expert, D, F
    ([5, 0, 130, 3], 7, 123, 77),
    ([1], 0, 64, 1),
    ([1, 0], 0, 64, 16),
    ([0, 0, 4], 0, 1, 40),
    ([0, 0], 0, 16, 16),
    ([0, 0], 5, 16, 16),
    ([40, 90, 70], 1, 72, 130),
]


def tensors(counts, tail, inner, columns, dtype):
    random = torch.Generator().manual_seed(sum(counts) + inner)
    rows = sum(counts) + tail
    x = torch.randn(rows, inner, generator=random).to(DEVICE, dtype)
    weight = torch.randn(len(counts), inner, columns, generator=random).to(DEVICE, dtype)
    dout = torch.randn(rows, columns, generator=random).to(DEVICE, dtype)
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    return x, weight, dout, offsets


def looped(counts):
    def run(x, weight):
        out, first = [], 0
        for e, count in enumerate(counts):
            out.append(x[first : first + count] @ weight[e])
            first += count
        return torch.cat([*out, x.new_zeros(len(x) - first, weight.shape[2])])

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_no_larger_than_eager(case, dtype):
    x, weight, dout, offsets = tensors(*case, dtype)
    # sums of the same products in another order
    terms = torch.finfo(torch.float32).eps * max(*case[0], case[2], case[3]) * 4
    assert_no_less_exact(
        lambda x, w: grouped_matmul(x, w, offsets, backend="triton"),
        looped(case[0]),
        [x, weight],
        [dout],
        floor=terms,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", [([5, 0, 30, 3], 7, 24, 40), ([9, 8], 0, 64, 16)], ids=str)
def test_torchs_own_kernel_gives_the_same(case, transposed):
    x, weight, dout, offsets = tensors(*case, torch.bfloat16)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = weight.requires_grad_(), x.requires_grad_()
    out = grouped_matmul(x, weight, offsets, backend="torch")
    gradients = torch.autograd.grad(out, wanted, dout)
    expected = looped(case[0])(x, weight)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    for got, want in zip(gradients, torch.autograd.grad(expected, wanted, dout), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=5e-2)
    assert gradients[0].stride() == weight.stride()
    assert not out[sum(case[0]) :].any()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_experts_held_the_other_way_round(backend):
    x, weight, dout, offsets = tensors([4, 9], 0, 16, 24, torch.bfloat16)
    held = weight.transpose(1, 2).contiguous().requires_grad_()
    out = grouped_matmul(x, held.transpose(1, 2), offsets, backend=backend)
    out.backward(dout)
    expected = weight.clone().requires_grad_()
    other = grouped_matmul(x, expected, offsets, backend=backend)
    other.backward(dout)
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(held.grad, expected.grad.transpose(1, 2))
    assert held.grad.is_contiguous()


def test_strided_rows_and_an_expanded_gradient():
    x, weight, _, offsets = tensors([4, 9], 2, 10, 12, torch.float32)
    wide = torch.stack((x, x), -1)
    for form in (torch.cat((x, x), 1)[:, :10], wide[..., 0]):
        ours, theirs = form.detach().requires_grad_(), x.clone().requires_grad_()
        grouped_matmul(ours, weight, offsets, backend="triton").sum().backward()
        looped([4, 9])(theirs, weight).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_same_run_twice_is_the_same():
    x, weight, dout, offsets = tensors([20, 0, 31], 3, 40, 50, torch.float32)
    weight.requires_grad_()
    runs = []
    for _ in range(2):
        out = grouped_matmul(x, weight, offsets, backend="triton")
        runs.append((out, *torch.autograd.grad(out, weight, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_rows_of_no_expert_never_reach_a_gradient():
    x, weight, dout, offsets = tensors([3, 2], 4, 16, 8, torch.bfloat16)
    x[5:], dout[5:] = torch.nan, torch.nan
    for backend in ("triton", "torch", "reference"):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = grouped_matmul(*leaves, offsets, backend=backend)
        dx, dw = torch.autograd.grad(out, leaves, dout)
        assert not out[5:].any() and not dx[5:].any()
        assert dw.isfinite().all()


def test_what_torch_leaves_undefined_is_cleared():
    from cai_kernels.grouped_matmul import triton

    offsets = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=DEVICE)
    out = torch.full((40, 1100), torch.nan, device=DEVICE)
    triton.clear_tail(out, offsets)
    assert out[:5].isnan().all() and not out[5:].any()
    matrices = torch.full((3, 33, 70), torch.nan, device=DEVICE)
    triton.clear_empty(matrices, offsets)
    assert matrices[[0, 2]].isnan().all() and not matrices[1].any()


def test_reference_gradients():
    x = torch.randn(7, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weight = torch.randn(3, 3, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=DEVICE)
    assert torch.autograd.gradcheck(
        lambda x, w: grouped_matmul(x, w, offsets, backend="reference"), (x, weight)
    )


def test_the_ops_are_clean_for_the_compiler():
    from cai_kernels.grouped_matmul import torch_kernel, triton

    x, weight, _, offsets = tensors([4, 0, 9], 2, 16, 24, torch.bfloat16)
    other = weight.transpose(1, 2).contiguous().transpose(1, 2)
    for held in (weight, other):
        for op in (triton.grouped_matmul, torch_kernel.grouped_matmul):
            torch.library.opcheck(op, (x.clone().requires_grad_(), held.detach().requires_grad_(), offsets))
    for backend in ("triton", "torch", "reference"):
        whole = lambda x, w, backend=backend: grouped_matmul(x * 2, w, offsets, backend=backend)  # noqa: E731
        compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(compiled(leaf, weight), whole(leaf, weight))


def test_errors_name_the_argument():
    x, weight, _, offsets = tensors([4, 9], 0, 16, 24, torch.bfloat16)
    with pytest.raises(KernelError, match=r"weight does not fit x(.|\n)*transpose"):
        grouped_matmul(x, weight.transpose(1, 2), offsets)
    with pytest.raises(KernelError, match="weight has an unsupported dtype"):
        grouped_matmul(x, weight.float(), offsets)
    with pytest.raises(KernelError, match="offsets has an unsupported dtype"):
        grouped_matmul(x, weight, offsets.long())
    with pytest.raises(KernelError, match="offsets does not fit weight"):
        grouped_matmul(x, weight, offsets[1:])
    with pytest.raises(KernelError, match="offsets is on another device"):
        grouped_matmul(x, weight, offsets.to("meta"))
    with pytest.raises(KernelError, match=r"torch's grouped matmul does not take(.|\n)*float32"):
        grouped_matmul(x.float(), weight.float(), offsets, backend="torch")
    with pytest.raises(KernelError, match=r"torch's grouped matmul does not take(.|\n)*multiples of 8"):
        grouped_matmul(x[:, :9], weight[:, :9], offsets, backend="torch")
    many = torch.zeros(1024, 16, 8, dtype=torch.bfloat16, device=DEVICE)
    none = torch.zeros(1025, dtype=torch.int32, device=DEVICE)
    with pytest.raises(KernelError, match=r"torch's grouped matmul does not take(.|\n)*1024 experts"):
        grouped_matmul(x, many, none, backend="torch")
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        grouped_matmul(x.double(), weight.double(), offsets, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_products_on_the_gpu(backend, dtype):
    if backend == "torch" and dtype != torch.bfloat16:
        with pytest.raises(KernelError):
            grouped_matmul(
                *tensors([4], 0, 8, 8, dtype)[:2], torch.tensor([0, 4]).int().cuda(), backend="torch"
            )
        return
    counts = [1000, 0, 3, 2500, 130, 0, 64, 399]
    x, weight, dout, offsets = tensors(counts, 100, 1024, 1536, dtype)
    leaves = x.requires_grad_(), weight.requires_grad_()
    out = grouped_matmul(*leaves, offsets, backend=backend)
    expected = looped(counts)(*leaves)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=0.25)
    pairs = zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    )
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=2e-2, atol=0.5)
