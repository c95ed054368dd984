"""RMSNorm: the kernel is no less exact than eager torch, for odd shapes and strides, forward and backward."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, SHAPES, assert_the_same_twice

from cai_kernels import KernelError, choose, rms_norm
from cai_kernels.rms_norm import reference
from cai_kernels.testing import assert_no_less_exact, results

CASTINGS = ["llama", "gemma"]


def tensors(shape, dtype, weight_dtype=None):
    random = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=random).to(DEVICE, dtype)
    weight = (1 + torch.randn(shape[-1:], generator=random) / 4).to(DEVICE, weight_dtype or dtype)
    dy = torch.randn(shape, generator=random).to(DEVICE, dtype)
    return x, weight, dy


def kernel(casting):
    return lambda x, weight: rms_norm(x, weight, casting=casting, backend="triton")


def plain(casting):
    return lambda x, weight: reference.rms_norm(x, weight, 1e-6, casting)


def cancelled(x, weight, dy):
    """What the difference in dx leaves in float32; with one column it is a difference of equals."""
    if not x.numel():
        return 0.0
    inverse = x.double().square().mean(-1).add(1e-6).rsqrt().max()
    terms = (dy.double() * (1 + weight.double().abs())).abs().max() * inverse
    return torch.finfo(torch.float32).eps * terms.item()


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype, casting):
    x, weight, dy = tensors(shape, dtype)
    floor = (0.0, cancelled(x, weight, dy), 0.0)
    assert_no_less_exact(kernel(casting), plain(casting), (x, weight), (dy,), floor=floor)


@pytest.mark.parametrize("casting", CASTINGS)
def test_a_row_that_no_program_holds(casting, monkeypatch):
    from cai_kernels import row_norm

    x, weight, dy = tensors((3, 300), torch.bfloat16)
    whole = results(kernel(casting), (x, weight), (dy,))
    monkeypatch.setattr(row_norm, "NARROW", 256)
    monkeypatch.setattr(row_norm, "WIDE_BLOCK", 128)
    parts = results(kernel(casting), (x, weight), (dy,))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=1e-3)
    assert_no_less_exact(kernel(casting), plain(casting), (x, weight), (dy,), floor=cancelled(x, weight, dy))


def test_weight_gradients_apart_from_uneven_large_rows(monkeypatch):
    from cai_kernels import row_norm

    monkeypatch.setattr(row_norm, "NARROW", 128)
    x, weight, dy = tensors((35, 100), torch.float32)
    assert_no_less_exact(kernel("llama"), plain("llama"), (x, weight), (dy,))


@pytest.mark.parametrize("casting", CASTINGS)
def test_weight_of_another_dtype(casting):
    x, weight, dy = tensors((6, 40), torch.bfloat16, torch.float32)
    assert rms_norm(x, weight, casting=casting, backend="triton").dtype == (
        torch.float32 if casting == "llama" else torch.bfloat16
    )
    # Values are rounded to bfloat16 on their way to a float32 result; Triton's interpreter truncates there.
    rounded = torch.finfo(torch.bfloat16).eps * plain(casting)(x, weight).abs().max().item()
    assert_no_less_exact(kernel(casting), plain(casting), (x, weight), (dy,), floor=(rounded, 0.0, 0.0))


@pytest.mark.parametrize("casting", CASTINGS)
def test_no_weight(casting):
    x, _, dy = tensors((6, 40), torch.bfloat16)
    assert_no_less_exact(
        lambda a: rms_norm(a, casting=casting, backend="triton"),
        lambda a: reference.rms_norm(a, None, 1e-6, casting),
        (x,),
        (dy,),
    )


def test_many_rows_with_an_uneven_rest():
    x, weight, dy = tensors((333, 24), torch.float32)
    order = torch.finfo(torch.float32).eps * 333**0.5  # of the weight gradient's sum
    assert_no_less_exact(kernel("llama"), plain("llama"), (x, weight), (dy,), floor=(0.0, 0.0, order))


def test_strided_inputs_are_read_where_they_lie():
    x, weight, dy = tensors((6, 40), torch.float32)
    expected = results(plain("llama"), (x, weight), (dy,))
    for wide in (torch.stack((x, x), -1)[..., 0], torch.cat((x, x), -1)[:, :40], x.t().contiguous().t()):
        leaf = wide.detach().requires_grad_()
        y = rms_norm(leaf, weight, backend="triton")
        (dx,) = torch.autograd.grad(y, leaf, dy.t().contiguous().t())
        torch.testing.assert_close(y.detach(), expected[0])
        torch.testing.assert_close(dx, expected[1])


def test_gradients_are_only_made_where_they_are_needed():
    x, weight, dy = tensors((6, 40), torch.float32)
    want = results(plain("llama"), (x, weight), (dy,))
    x.requires_grad_()
    rms_norm(x, weight, backend="triton").backward(dy)
    torch.testing.assert_close(x.grad, want[1])
    x, kept = x.detach(), dy.clone()
    rms_norm(x, weight.requires_grad_(), backend="triton").backward(dy)
    torch.testing.assert_close(weight.grad, want[2])
    assert torch.equal(dy, kept)  # backward does not write over what it is given


def test_the_same_run_twice_is_the_same():
    x, weight, dy = tensors((33, 77), torch.bfloat16)
    assert_the_same_twice(kernel("llama"), (x, weight), (dy,))


@pytest.mark.parametrize("casting", CASTINGS)
def test_reference_gradients(casting):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plain(casting), (x, weight))


def test_matches_torch():
    x, weight, _ = tensors((4, 32), torch.float32)
    torch.testing.assert_close(rms_norm(x, weight), torch.nn.functional.rms_norm(x, (32,), weight, 1e-6))
    torch.testing.assert_close(
        rms_norm(x, weight, casting="gemma"), torch.nn.functional.rms_norm(x, (32,), weight + 1, 1e-6)
    )


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.rms_norm import triton

    x, weight, _ = tensors((2, 2, 32), torch.float32)
    torch.library.opcheck(triton.rms_norm, (x.requires_grad_(), weight.requires_grad_(), 1e-6, "llama"))
    torch.library.opcheck(triton.rms_norm, (x, None, 1e-6, "gemma"))
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
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        rms_norm(x.double(), weight, backend="triton")
    with pytest.raises(KernelError, match="x has no dim"):
        rms_norm(x[0, 0])
    with pytest.raises(KernelError, match="weight is on another device"):
        rms_norm(x, weight.to("meta"))
    with pytest.raises(KernelError, match="unknown casting"):
        rms_norm(x, weight, casting="other")
    with pytest.raises(KernelError, match="unknown backend"):
        rms_norm(x, weight, backend="fast")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose("auto", torch.device("cpu")) == "reference"
    with pytest.raises(KernelError, match="cannot run here"):
        rms_norm(x.cpu(), weight.cpu(), backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements():
    x = torch.ones(2**18 + 1, 2**13, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.full((2**13,), 2.0, dtype=torch.bfloat16, device="cuda")
    y = rms_norm(x, weight)
    y.backward(torch.ones_like(y))
    assert y[-1].eq(2).all() and x.grad[-1].abs().max() < 1e-3
