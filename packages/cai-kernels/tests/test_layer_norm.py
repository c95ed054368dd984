"""Layer norm: the kernel is no less exact than eager torch, for odd shapes and strides, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, DTYPES, SHAPES, assert_the_same_twice

from cai_kernels import KernelError, layer_norm
from cai_kernels.layer_norm import reference
from cai_kernels.testing import assert_no_less_exact, results


def tensors(shape, dtype):
    random = torch.Generator().manual_seed(sum(shape))
    x = 3 + torch.randn(shape, generator=random)
    weight = 1 + torch.randn(shape[-1:], generator=random) / 4
    bias = torch.randn(shape[-1:], generator=random)
    dy = torch.randn(shape, generator=random)
    return [t.to(DEVICE, dtype) for t in (x, weight, bias, dy)]


def kernel(x, weight=None, bias=None):
    return layer_norm(x, weight, bias, backend="triton")


def plain(x, weight=None, bias=None):
    return reference.layer_norm(x, weight, bias, 1e-5)


def cancelled(x, weight, dy):
    """What the differences in dx leave in float32; with one column they are differences of equals."""
    if not x.numel():
        return 0.0
    inverse = x.double().var(-1, correction=0).add(1e-5).rsqrt().max()
    return 4 * torch.finfo(torch.float32).eps * ((dy.double() * weight).abs().max() * inverse).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype):
    *inputs, dy = tensors(shape, dtype)
    floor = (0.0, cancelled(inputs[0], inputs[1], dy), 0.0, 0.0)
    assert_no_less_exact(kernel, plain, inputs, (dy,), floor=floor)


@pytest.mark.parametrize("narrow", [256, 512])
def test_a_row_that_no_program_holds(narrow, monkeypatch):
    from cai_kernels import row_norm

    *inputs, dy = tensors((19, 300), torch.bfloat16)
    monkeypatch.setattr(
        row_norm, "NARROW", narrow
    )  # 256: blocks of columns; 512: parameters' gradients apart
    monkeypatch.setattr(row_norm, "WIDE_BLOCK", 128)
    assert_no_less_exact(kernel, plain, inputs, (dy,), floor=cancelled(inputs[0], inputs[1], dy))


def test_without_weight_or_bias():
    x, weight, bias, dy = tensors((6, 40), torch.bfloat16)
    assert_no_less_exact(kernel, plain, (x,), (dy,))
    assert_no_less_exact(kernel, plain, (x, weight), (dy,))
    assert_no_less_exact(lambda a, b: kernel(a, None, b), lambda a, b: plain(a, None, b), (x, bias), (dy,))


def test_parameters_of_another_dtype():
    x, weight, bias, dy = tensors((6, 40), torch.bfloat16)
    assert_no_less_exact(kernel, plain, (x, weight.float(), bias), (dy,))


def test_strided_input():
    x, weight, bias, dy = tensors((6, 40), torch.float32)
    wide = torch.cat((x, x), -1)[:, 40:].requires_grad_()
    want = results(plain, (x, weight, bias), (dy,))
    y = kernel(wide, weight, bias)
    torch.testing.assert_close(y.detach(), want[0])
    torch.testing.assert_close(torch.autograd.grad(y, wide, dy)[0], want[1])


def test_gradients_are_only_made_where_they_are_needed():
    x, weight, bias, dy = tensors((6, 40), torch.float32)
    want = results(plain, (x, weight, bias), (dy,))
    for i, leaf in enumerate((x, weight, bias)):
        leaf.requires_grad_()
        kernel(x, weight, bias).backward(dy)
        torch.testing.assert_close(leaf.grad, want[1 + i])
        leaf.requires_grad_(False)


def test_the_same_run_twice_is_the_same():
    *inputs, dy = tensors((33, 77), torch.bfloat16)
    assert_the_same_twice(kernel, inputs, (dy,))


def test_reference_gradients_and_values():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (5,)))
    assert torch.autograd.gradcheck(plain, (x, weight, bias))
    torch.testing.assert_close(layer_norm(x, weight, bias), F.layer_norm(x, (5,), weight, bias))


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.layer_norm import triton

    x, weight, bias, _ = (t.requires_grad_() for t in tensors((2, 2, 32), torch.float32))
    torch.library.opcheck(triton.layer_norm, (x, weight, bias, 1e-5))
    torch.library.opcheck(triton.layer_norm, (x, None, bias, 1e-5))
    compiled = torch.compile(lambda *a: kernel(*a) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, bias), kernel(x, weight, bias) * 2)


def test_errors_name_the_argument():
    x, weight, bias, _ = tensors((4, 32), torch.float32)
    with pytest.raises(KernelError, match="weight does not fit"):
        layer_norm(x, weight[:5], bias)
    with pytest.raises(KernelError, match="bias does not fit"):
        layer_norm(x, weight, bias[:5])
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        layer_norm(x.int(), weight)
    with pytest.raises(KernelError, match="bias has an unsupported dtype"):
        layer_norm(x, weight, bias.int())
    with pytest.raises(KernelError, match="weight is on another device"):
        layer_norm(x, weight.to("meta"))
    with pytest.raises(KernelError, match="x has no dim"):
        layer_norm(x[0, 0])
