"""Gated activations: no less exact than eager torch, packed or apart, for odd shapes and strides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, DTYPES, SHAPES, assert_gradients_alone, assert_the_same_twice

from cai_kernels import KernelError, geglu, sigmoid_gate, swiglu
from cai_kernels.gated import reference
from cai_kernels.testing import assert_no_less_exact, results

FORMS = {
    "silu": lambda gate, up=None: swiglu(gate, up, backend="triton"),
    "gelu_tanh": lambda gate, up=None: geglu(gate, up, backend="triton"),
    "gelu": lambda gate, up=None: geglu(gate, up, approximate="none", backend="triton"),
    "sigmoid": lambda gate, up=None: sigmoid_gate(up, gate, backend="triton"),
}


def plain(kind):
    return lambda gate, up=None: reference.gated(gate, up, kind)


def tensors(shape, dtype):
    random = torch.Generator().manual_seed(sum(shape))
    return [(2 * torch.randn(shape, generator=random)).to(DEVICE, dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_error_is_no_larger_than_eager(shape, dtype, kind):
    gate, up, dy = tensors(shape, dtype)
    assert_no_less_exact(FORMS[kind], plain(kind), (gate, up), (dy,))


@pytest.mark.parametrize("kind", list(FORMS))
def test_every_form(kind):
    gate, up, dy = tensors((6, 50), torch.float32)
    assert_no_less_exact(FORMS[kind], plain(kind), (gate, up), (dy,))


def test_the_forms_are_those_of_torch():
    gate, up, _ = tensors((6, 50), torch.float32)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    torch.testing.assert_close(geglu(gate, up), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(geglu(gate, up, approximate="none"), F.gelu(gate) * up)
    torch.testing.assert_close(sigmoid_gate(up, gate), up * gate.sigmoid())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 123])
def test_packed(width, dtype):
    packed = torch.cat(tensors((2, 5, width), dtype)[:2], -1)
    dy = tensors((2, 5, width), dtype)[2]
    assert_no_less_exact(FORMS["silu"], plain("silu"), (packed,), (dy,))
    assert_no_less_exact(FORMS["gelu_tanh"], plain("gelu_tanh"), (packed,), (dy,))


def test_views_are_read_where_they_lie():
    gate, up, dy = tensors((6, 40), torch.float32)
    want = results(plain("silu"), (gate, up), (dy,))
    packed = torch.cat((gate, up), -1)
    for a, b in ((packed[:, :40], packed[:, 40:]), (packed[:, :40], up), (gate.t().contiguous().t(), up)):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        y = FORMS["silu"](a, b)
        torch.testing.assert_close([y.detach(), *torch.autograd.grad(y, (a, b), dy)], want)
        torch.testing.assert_close(torch.autograd.grad(FORMS["silu"](a, b).sum(), a)[0].shape, a.shape)


def test_gradients_are_only_made_where_they_are_needed():
    gate, up, dy = tensors((6, 40), torch.float32)
    want = results(plain("silu"), (gate, up), (dy,))
    kept = dy.clone()
    assert_gradients_alone(FORMS["silu"], (gate, up), dy, want[1:])
    assert torch.equal(dy, kept)


def test_large_values_stay_finite():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE, requires_grad=True)
    for kind in FORMS:
        y = FORMS[kind](gate, torch.ones_like(gate))
        (slope,) = torch.autograd.grad(y.sum(), gate)
        assert y.isfinite().all() and slope.isfinite().all(), kind


def test_the_same_run_twice_is_the_same():
    *inputs, dy = tensors((33, 77), torch.bfloat16)
    assert_the_same_twice(FORMS["silu"], inputs, (dy,))


@pytest.mark.parametrize("kind", list(FORMS))
def test_reference_gradients(kind):
    inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(plain(kind), inputs)
    assert torch.autograd.gradcheck(plain(kind), inputs[:1])


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.gated import triton

    gate, up, _ = (t.requires_grad_() for t in tensors((2, 3, 32), torch.float32))
    torch.library.opcheck(triton.gated, (gate, up, "silu"))
    torch.library.opcheck(triton.gated, (gate, None, "gelu"))
    compiled = torch.compile(lambda a, b: FORMS["silu"](a, b) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gate, up), FORMS["silu"](gate, up) * 2)


def test_errors_name_the_argument():
    gate, up, _ = tensors((4, 33), torch.float32)
    with pytest.raises(KernelError, match="a packed gate has an odd last dim"):
        swiglu(gate)
    with pytest.raises(KernelError, match="up does not fit gate"):
        swiglu(gate, up[:2])
    with pytest.raises(KernelError, match="up has an unsupported dtype"):
        geglu(gate, up.half())
    with pytest.raises(KernelError, match="up is on another device"):
        geglu(gate, up.to("meta"))
    with pytest.raises(KernelError, match="gate has an unsupported dtype"):
        swiglu(gate.int(), up)
    with pytest.raises(KernelError, match="unknown approximate"):
        geglu(gate, up, approximate="erf")
    with pytest.raises(KernelError, match="x does not fit gate"):
        sigmoid_gate(gate[:2], up)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements():
    gate = torch.ones(2**18 + 1, 2**13, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y = swiglu(gate, gate.detach())
    y.backward(y.detach())
    want = F.silu(torch.ones(1, dtype=torch.bfloat16, device="cuda"))
    torch.testing.assert_close(y[-1, -1:], want)
    assert gate.grad[-1, -1] == gate.grad[0, 0]
