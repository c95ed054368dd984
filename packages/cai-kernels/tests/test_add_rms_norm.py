"""Residual sum and RMSNorm: both results and every gradient are no less exact than eager torch's."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, SHAPES, assert_the_same_twice

from cai_kernels import KernelError, add_rms_norm
from cai_kernels.add_rms_norm import reference
from cai_kernels.testing import assert_no_less_exact, results


def tensors(shape, dtype):
    random = torch.Generator().manual_seed(sum(shape))
    x, residual, dy, dsum = (torch.randn(shape, generator=random).to(DEVICE, dtype) for _ in range(4))
    weight = (1 + torch.randn(shape[-1:], generator=random) / 4).to(DEVICE, dtype)
    return (x, residual, weight), (dy, dsum)


def kernel(x, residual, weight=None, casting="llama"):
    return add_rms_norm(x, residual, weight, casting=casting, backend="triton")


def plain(x, residual, weight=None, casting="llama"):
    return reference.add_rms_norm(x, residual, weight, 1e-6, casting)


def cancelled(inputs, upstream):
    """What the difference in dx leaves in float32; with one column it is a difference of equals."""
    total, weight = inputs[0].double() + inputs[1].double(), inputs[2]
    if not total.numel():
        return 0.0
    inverse = total.square().mean(-1).add(1e-6).rsqrt().max()
    terms = (upstream[0].double() * weight).abs().max() * inverse
    return torch.finfo(torch.float32).eps * terms.item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype):
    # The rounded sum moves what is normalized: float64 is given the sum as it is rounded.
    (x, residual, weight), upstream = tensors(shape, dtype)
    residual = ((x + residual).double() - x.double()).to(dtype)
    inputs = (x, residual, weight)
    least = cancelled(inputs, upstream)
    assert_no_less_exact(kernel, plain, inputs, upstream, floor=(0.0, 0.0, least, least, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter truncates to bfloat16
def test_the_sum_is_that_of_torch(dtype):
    (x, residual, weight), _ = tensors((33, 50), dtype)
    assert torch.equal(kernel(x, residual, weight)[1], x + residual)


@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_a_row_that_no_program_holds(casting, monkeypatch):
    from cai_kernels import row_norm

    inputs, upstream = tensors((3, 300), torch.float32)
    monkeypatch.setattr(row_norm, "NARROW", 256)
    monkeypatch.setattr(row_norm, "WIDE_BLOCK", 128)
    assert_no_less_exact(
        lambda *a: kernel(*a, casting=casting), lambda *a: plain(*a, casting=casting), inputs, upstream
    )


def test_gradients_into_one_output_only():
    (x, residual, weight), (dy, dsum) = tensors((6, 40), torch.float32)
    for pick, upstream in ((0, dy), (1, dsum)):
        want = results(lambda *a, pick=pick: plain(*a)[pick], (x, residual, weight), (upstream,))
        got = results(lambda *a, pick=pick: kernel(*a)[pick], (x, residual, weight), (upstream,))
        torch.testing.assert_close(got, want)


def test_the_two_gradients_do_not_share_a_gradient_buffer():
    (x, residual, weight), upstream = tensors((6, 40), torch.float32)
    x.requires_grad_()
    residual.requires_grad_()
    for _ in range(2):  # the second adds to what the first left in .grad
        torch.autograd.backward(kernel(x, residual, weight), upstream)
    want = results(plain, (x.detach(), residual.detach(), weight), upstream)
    torch.testing.assert_close(x.grad, 2 * want[2])
    torch.testing.assert_close(residual.grad, 2 * want[3])


def test_strided_inputs_without_weight():
    (x, residual, _), upstream = tensors((6, 40), torch.float32)
    strided = torch.cat((x, x), -1)[:, 40:], residual.t().contiguous().t()
    torch.testing.assert_close(
        results(kernel, strided, upstream), results(plain, (x, residual), upstream), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(kernel(*strided)[0], plain(x, residual)[0])


def test_the_same_run_twice_is_the_same():
    inputs, upstream = tensors((33, 77), torch.bfloat16)
    assert_the_same_twice(kernel, inputs, upstream)


def test_reference_gradients():
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (3, 5), (5,))]
    assert torch.autograd.gradcheck(plain, inputs)


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.add_rms_norm import triton

    inputs = [t.requires_grad_() for t in tensors((2, 2, 32), torch.float32)[0]]
    torch.library.opcheck(triton.add_rms_norm, (*inputs, 1e-6, "llama"))
    compiled = torch.compile(lambda *a: kernel(*a), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), kernel(*inputs))


def test_errors_name_the_argument():
    (x, residual, weight), _ = tensors((4, 32), torch.float32)
    with pytest.raises(KernelError, match="residual does not fit"):
        add_rms_norm(x, residual[:2], weight)
    with pytest.raises(KernelError, match="residual has an unsupported dtype"):
        add_rms_norm(x, residual.half(), weight)
    with pytest.raises(KernelError, match="residual is on another device"):
        add_rms_norm(x, residual.to("meta"), weight)
    with pytest.raises(KernelError, match="weight does not fit"):
        add_rms_norm(x, residual, weight[:3])
