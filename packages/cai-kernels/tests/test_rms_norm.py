"""RMSNorm: the kernel is no less exact than eager torch, for odd shapes and strides, forward and backward."""

from __future__ import annotations

import pytest
import torch

from cai_kernels import KernelError, choose, rms_norm
from cai_kernels.rms_norm import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(5, 123, 123), (1, 64), (7, 1), (0, 16), (3, 4, 1000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(shape, dtype):
    random = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=random).to(DEVICE, dtype)
    weight = (1 + torch.randn(shape[-1:], generator=random) / 4).to(DEVICE, dtype)
    dy = torch.randn(shape, generator=random).to(DEVICE, dtype)
    return x, weight, dy


def run(fn, x, weight, dy):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = fn(x, weight, 1e-6)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype):
    x, weight, dy = tensors(shape, dtype)
    exact = run(reference.rms_norm, x.double(), weight.double(), dy.double())
    eager = run(reference.rms_norm, x, weight, dy)
    kernel = run(lambda *a: rms_norm(*a, backend="triton"), x, weight, dy)
    inverse = x.double().square().mean(-1).add(1e-6).rsqrt().max() if x.numel() else 0.0
    terms = (
        torch.finfo(torch.float32).eps * (dy.double() * weight).abs().max() * inverse if x.numel() else 0.0
    )
    for name, want, ours, theirs in zip(("y", "dx", "dw"), exact, kernel, eager, strict=True):
        assert ours.dtype == dtype
        if not want.numel():
            assert ours.shape == want.shape
            continue
        # dx is a difference; with one column, of equals
        floor = torch.finfo(dtype).eps * want.abs().max() + terms
        allowed = 1.2 * (theirs.double() - want).abs().max() + floor
        assert (ours.double() - want).abs().max() <= allowed, name


def test_strided_input():
    x, weight, dy = tensors((6, 40), torch.float32)
    wide = torch.stack((x, x), -1).requires_grad_()
    y = rms_norm(wide[..., 0], weight, backend="triton")
    y.backward(dy)
    expected, dx, _ = run(reference.rms_norm, x, weight, dy)
    torch.testing.assert_close(y.detach(), expected)
    torch.testing.assert_close(wide.grad[..., 0], dx)


def test_the_same_run_twice_is_the_same():
    x, weight, dy = tensors((33, 77), torch.bfloat16)
    first = run(lambda *a: rms_norm(*a, backend="triton"), x, weight, dy)
    second = run(lambda *a: rms_norm(*a, backend="triton"), x, weight, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_reference_gradients():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: reference.rms_norm(a, b, 1e-6), (x, weight))


def test_matches_torch():
    x, weight, _ = tensors((4, 32), torch.float32)
    torch.testing.assert_close(rms_norm(x, weight), torch.nn.functional.rms_norm(x, (32,), weight, 1e-6))


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.rms_norm import triton

    x, weight, _ = tensors((4, 32), torch.float32)
    args = (x.requires_grad_(), weight.requires_grad_(), 1e-6)
    torch.library.opcheck(triton.rms_norm, args)
    compiled = torch.compile(
        lambda a, b: rms_norm(a, b, backend="triton") * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x, weight), rms_norm(x, weight, backend="triton") * 2)


def test_errors_name_the_argument(monkeypatch):
    x, weight, _ = tensors((4, 32), torch.float32)
    with pytest.raises(KernelError, match="weight does not fit"):
        rms_norm(x, weight[:5])
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        rms_norm(x.int(), weight)
    with pytest.raises(KernelError, match="weight is on another device"):
        rms_norm(x, weight.to("meta"))
    with pytest.raises(KernelError, match="unknown backend"):
        rms_norm(x, weight, backend="fast")
    with pytest.raises(KernelError, match="does not take"):
        rms_norm(x, weight.half(), backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose("auto", torch.device("cpu")) == "reference"
    with pytest.raises(KernelError, match="cannot run here"):
        rms_norm(x.cpu(), weight.cpu(), backend="triton")
