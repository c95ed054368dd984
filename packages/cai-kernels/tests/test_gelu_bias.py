"""GELU of a biased input: no less exact than eager torch, for odd shapes and strides."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, SHAPES, assert_gradients_alone, assert_the_same_twice

from cai_kernels import KernelError, gelu_bias
from cai_kernels.gelu_bias import reference
from cai_kernels.testing import assert_no_less_exact, results

APPROXIMATE = ["none", "tanh"]


def tensors(shape, dtype):
    random = torch.Generator().manual_seed(sum(shape))
    x, dy = (2 * torch.randn(shape, generator=random) for _ in range(2))
    return [t.to(DEVICE, dtype) for t in (x, torch.randn(shape[-1:], generator=random), dy)]


def kernel(approximate="none"):
    return lambda x, bias: gelu_bias(x, bias, approximate=approximate, backend="triton")


def plain(approximate="none"):
    return lambda x, bias: reference.gelu_bias(x, bias, approximate)


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype, approximate):
    x, bias, dy = tensors(shape, dtype)
    assert_no_less_exact(kernel(approximate), plain(approximate), (x, bias), (dy,))


def test_strided_inputs():
    x, bias, dy = tensors((6, 40), torch.float32)
    want = results(plain(), (x, bias), (dy,))
    for view in (torch.cat((x, x), -1)[:, 40:], x.t().contiguous().t()):
        leaf = view.detach().requires_grad_()
        y = kernel()(leaf, torch.stack((bias, bias), -1)[:, 0])
        torch.testing.assert_close([y.detach(), *torch.autograd.grad(y, leaf, dy)], want[:2])


def test_gradients_are_only_made_where_they_are_needed():
    x, bias, dy = tensors((6, 40), torch.float32)
    want = results(plain(), (x, bias), (dy,))
    assert_gradients_alone(kernel(), (x, bias), dy, want[1:])


def test_the_same_run_twice_is_the_same():
    *inputs, dy = tensors((133, 77), torch.bfloat16)
    assert_the_same_twice(kernel(), inputs, (dy,))


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_reference_gradients(approximate):
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4,))]
    assert torch.autograd.gradcheck(plain(approximate), inputs)


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.gelu_bias import triton

    x, bias, _ = (t.requires_grad_() for t in tensors((2, 3, 32), torch.float32))
    torch.library.opcheck(triton.gelu_bias, (x, bias, "gelu"))
    compiled = torch.compile(lambda a, b: kernel()(a, b) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, bias), kernel()(x, bias) * 2)


def test_errors_name_the_argument():
    x, bias, _ = tensors((4, 32), torch.float32)
    with pytest.raises(KernelError, match="bias does not fit"):
        gelu_bias(x, bias[:3])
    with pytest.raises(KernelError, match="bias has an unsupported dtype"):
        gelu_bias(x, bias.half())
    with pytest.raises(KernelError, match="bias is on another device"):
        gelu_bias(x, bias.to("meta"))
    with pytest.raises(KernelError, match="unknown approximate"):
        gelu_bias(x, bias, approximate="fast")
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        gelu_bias(x.int(), bias)
