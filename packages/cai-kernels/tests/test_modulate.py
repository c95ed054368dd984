"""Adaptive layer norm and its gate: no less exact than eager torch, gradients of samples summed over their tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, DTYPES, assert_gradients_alone, assert_the_same_twice

from cai_kernels import KernelError, gate_add, modulate
from cai_kernels.modulate import reference
from cai_kernels.testing import assert_no_less_exact, results

# samples, tokens and columns: odd ones, one sample, one token, one column, no samples, no tokens
SHAPES = [(3, 37, 40), (1, 5, 300), (4, 1, 17), (2, 3, 1), (0, 3, 8), (2, 0, 8)]


def tensors(shape, dtype=torch.float32):
    random = torch.Generator().manual_seed(sum(shape))
    x, residual, dy = (torch.randn(shape, generator=random).to(DEVICE, dtype) for _ in range(3))
    scale, shift = (torch.randn(shape[::2], generator=random).to(DEVICE, dtype) / 2 for _ in range(2))
    return 3 + x, residual, scale, shift, dy


def kernel(x, scale, shift):
    return modulate(x, scale, shift, 1e-5, backend="triton")


def plain(x, scale, shift):
    return reference.modulate(x, scale, shift, 1e-5)


def gated(residual, x, gate):
    return gate_add(residual, x, gate, backend="triton")


def cancelled(x, scale, dy):
    """What the differences in dx leave in float32; with one column they are differences of equals."""
    if not x.numel():
        return 0.0
    inverse = x.double().var(-1, correction=0).add(1e-5).rsqrt().max()
    factor = (1 + scale.double()).abs().max()
    return 4 * torch.finfo(torch.float32).eps * (dy.double().abs().max() * factor * inverse).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype):
    x, residual, scale, shift, dy = tensors(shape, dtype)
    floor = (0.0, cancelled(x, scale, dy), 0.0, 0.0)
    assert_no_less_exact(kernel, plain, (x, scale, shift), (dy,), floor=floor)
    assert_no_less_exact(gated, reference.gate_add, (residual, x, scale), (dy,))


def test_tokens_in_many_parts(monkeypatch):
    from cai_kernels.modulate import triton

    monkeypatch.setattr(triton, "TILE", 64)
    monkeypatch.setattr(triton, "BLOCK", 16)
    x, residual, scale, shift, dy = tensors((2, 41, 24), torch.bfloat16)
    assert_no_less_exact(kernel, plain, (x, scale, shift), (dy,))
    assert_no_less_exact(gated, reference.gate_add, (residual, x, scale), (dy,))


def test_it_is_what_models_write():
    x, residual, scale, shift, _ = tensors((3, 7, 20))
    want = F.layer_norm(x, (20,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(modulate(x, scale, shift), want)
    torch.testing.assert_close(gate_add(residual, x, scale), residual + scale.unsqueeze(1) * x)


def test_chunks_and_other_strides_are_read_where_they_lie():
    x, residual, scale, shift, dy = tensors((3, 7, 20))
    want = results(plain, (x, scale, shift), (dy,))
    chunks = torch.cat((shift, scale), 1).requires_grad_()
    turned = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    second, first = chunks.chunk(2, 1)
    y = kernel(turned, first, second)
    dx, both = torch.autograd.grad(y, (turned, chunks), dy.mT.contiguous().mT)
    torch.testing.assert_close([y.detach(), dx, both[:, 20:], both[:, :20]], want)
    want = reference.gate_add(residual, x, scale)
    torch.testing.assert_close(gated(residual.mT.contiguous().mT, turned, first), want)
    torch.testing.assert_close(gated(residual, x, scale.t().contiguous().t()), want)


def test_samples_of_another_dtype():
    x, residual, scale, shift, dy = tensors((2, 6, 40), torch.bfloat16)
    assert_no_less_exact(kernel, plain, (x, scale.float(), shift), (dy,))
    assert_no_less_exact(gated, reference.gate_add, (residual, x, scale.float()), (dy,))


def test_gradients_are_only_made_where_they_are_needed():
    x, residual, scale, shift, dy = tensors((2, 6, 40))
    want = results(plain, (x, scale, shift), (dy,))
    assert_gradients_alone(kernel, (x, scale, shift), dy, want[1:])
    x, residual, scale, _, dy = tensors((2, 6, 40))
    want = results(reference.gate_add, (residual, x, scale), (dy,))
    assert_gradients_alone(gated, (residual, x, scale), dy, want[1:])


def test_the_same_run_twice_is_the_same():
    x, residual, scale, shift, dy = tensors((2, 33, 77), torch.bfloat16)
    assert_the_same_twice(kernel, (x, scale, shift), (dy,))
    assert_the_same_twice(gated, (residual, x, scale), (dy,))


def test_reference_gradients():
    x, residual, scale, shift = (
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((2, 3, 4), (2, 3, 4), (2, 4), (2, 4))
    )
    assert torch.autograd.gradcheck(plain, (x, scale, shift))
    assert torch.autograd.gradcheck(reference.gate_add, (residual, x, scale))


def test_the_ops_are_clean_for_the_compiler():
    from cai_kernels.modulate import triton

    x, residual, scale, shift, _ = (t.requires_grad_() for t in (tensors((2, 3, 16))))
    torch.library.opcheck(triton.modulate, (x, scale, shift, 1e-5))
    torch.library.opcheck(triton.gate_add, (residual, x, scale))

    def block(x, residual, scale, shift):
        return gated(residual, kernel(x, scale, shift), scale) * 2

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual, scale, shift), block(x, residual, scale, shift))


def test_errors_name_the_argument():
    x, residual, scale, shift, _ = tensors((2, 3, 16))
    with pytest.raises(KernelError, match="scale does not fit x"):
        modulate(x, scale[:1], shift)
    with pytest.raises(KernelError, match="shift does not fit x"):
        modulate(x, scale, shift[:, :3])
    with pytest.raises(KernelError, match="x is not tokens of samples"):
        modulate(x[0], scale, shift)
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        modulate(x.int(), scale, shift)
    with pytest.raises(KernelError, match="scale is on another device"):
        modulate(x, scale.to("meta"), shift)
    with pytest.raises(KernelError, match="gate does not fit x"):
        gate_add(residual, x, scale[:1])
    with pytest.raises(KernelError, match="residual does not fit x"):
        gate_add(residual[:1], x, scale)
    with pytest.raises(KernelError, match="residual has an unsupported dtype"):
        gate_add(residual.half(), x, scale)
    with pytest.raises(KernelError, match="too wide"):
        modulate(x.new_zeros(1, 1, 20000), *x.new_zeros(2, 1, 20000), backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements():
    x = torch.randn(3, 2**17 + 1, 2**13, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    scale, shift = torch.randn(2, 3, 2**13, dtype=torch.bfloat16, device="cuda")
    y = modulate(x, scale, shift)
    y.backward(y.detach())
    short = x.detach()[2:, -1:].float().requires_grad_()
    want = plain(short, scale[2:].float(), shift[2:].float())
    want.backward(y.detach()[2:, -1:].float())
    torch.testing.assert_close(y.detach()[2:, -1:].float(), want.detach(), rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(x.grad[2:, -1:].float(), short.grad, rtol=2**-6, atol=2**-5)
