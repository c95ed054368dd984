"""Softmax with scale, masks and biases: no less exact than eager torch, in AlphaFold's forms too."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, SHAPES, assert_gradients_alone, assert_the_same_twice

from cai_kernels import KernelError, softmax
from cai_kernels.softmax import reference
from cai_kernels.testing import assert_no_less_exact, results


def random(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return (2 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def kernel(scale=1.0, mask=None, causal=False, dtype=None):
    return lambda x, *bias: softmax(
        x, scale=scale, mask=mask, bias=bias, causal=causal, dtype=dtype, backend="triton"
    )


def plain(scale=1.0, mask=None, causal=False, dtype=None):
    def run(x, *bias):
        return reference.softmax(x, scale, mask, bias, causal, x.dtype if dtype is None else dtype)

    return run


def cancelled(dy):
    """What dy - dot(y, dy) leaves in float32; where one place takes all the weight it is a difference of equals."""
    return torch.finfo(torch.float32).eps * dy.abs().max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype):
    x, dy = random(*shape, dtype=dtype), random(*shape, dtype=dtype).flip(0)
    assert_no_less_exact(kernel(0.7), plain(0.7), (x,), (dy,))


@pytest.mark.parametrize("narrow", [16384, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_alphafold_forms(dtype, narrow, monkeypatch):
    from cai_kernels.softmax import triton

    monkeypatch.setattr(triton, "NARROW", narrow)  # rows that no program holds, too
    monkeypatch.setattr(triton, "WIDE_BLOCK", 16)
    x, dy = random(2, 3, 2, 5, 21, dtype=dtype), random(2, 3, 2, 5, 21, dtype=dtype).flip(3)
    masked, pair = random(2, 3, 1, 1, 21, dtype=dtype), random(2, 1, 2, 5, 21, dtype=dtype)
    assert_no_less_exact(kernel(0.3), plain(0.3), (x, masked, pair), (dy,), floor=cancelled(dy))


@pytest.mark.parametrize(
    "shape", [(), (1,), (21,), (5, 21), (5, 1), (2, 1, 1), (1, 1, 1, 5, 21), (2, 3, 2, 5, 21), (3, 1, 1, 21)]
)
def test_bias_gradients_over_any_broadcast_dims(shape):
    x, dy = random(2, 3, 2, 5, 21), random(2, 3, 2, 5, 21).flip(0)
    # A bias that is the same along a row has no gradient but what rounding leaves of equals.
    floor = 60 * cancelled(dy)
    assert_no_less_exact(kernel(), plain(), (x, random(*shape)), (dy,), floor=(0.0, 0.0, floor))


@pytest.mark.parametrize(
    ("shape", "first", "second", "together", "dtype"),
    [
        ((1, 18, 2, 21, 37), (18, 1, 1, 37), (1, 2, 21, 37), True, torch.float32),  # AlphaFold's
        ((1, 5, 2, 21, 37), (5, 1, 1, 37), (1, 2, 21, 37), True, torch.bfloat16),
        ((1, 3, 2, 8, 256), (3, 1, 1, 256), (1, 2, 8, 256), True, torch.float32),  # whole tiles
        ((2, 2, 20, 33), (20, 33), (2, 2, 20, 1), True, torch.float32),
        ((3, 2, 2, 1100), (1100,), (2, 1, 1), True, torch.float32),
        ((2, 3, 5, 21), (3, 5, 1), (2, 1, 1, 21), False, torch.float32),  # no whole rows, or too few
    ],
)
def test_the_gradient_of_a_bias_with_that_of_x(shape, first, second, together, dtype, monkeypatch):
    from cai_kernels.softmax import triton

    went, plainly = [], triton._backward_and_sum
    monkeypatch.setattr(triton, "_backward_and_sum", lambda *a: went.append(a[0]) or plainly(*a))
    x, dy = random(*shape, dtype=dtype), random(*shape, dtype=dtype).flip(0)
    biases = random(*first, dtype=dtype), random(*second, dtype=dtype)
    whole = results(kernel(0.3), (x, *biases), (dy,))
    assert len(went) == together
    if dtype == torch.float32:
        # what is the same along a row has no gradient but what rounding leaves of equals
        floor = [0.0, *(cancelled(dy) * (60 if b.shape[-1] == 1 else 1) for b in (x, *biases))]
        assert_no_less_exact(kernel(0.3), plain(0.3), (x, *biases), (dy,), floor=floor)
    went.clear()
    monkeypatch.setattr(triton, "SHARED", 0)
    for a, b in zip(whole, results(kernel(0.3), (x, *biases), (dy,)), strict=True):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=60 * cancelled(dy))
    assert not went
    monkeypatch.undo()
    (only,) = results(lambda b: kernel(0.3)(x, biases[0], b), biases[1:], (dy,))[1:]
    torch.testing.assert_close(only, whole[3], rtol=2 * torch.finfo(dtype).eps, atol=60 * cancelled(dy))


def test_rows_that_share_a_bias_are_read_where_they_lie(monkeypatch):
    from cai_kernels.softmax import triton

    monkeypatch.setattr(triton, "PIECE", 32)
    went, plainly = [], triton._forward_beside
    monkeypatch.setattr(triton, "_forward_beside", lambda *a: went.append(a[0].shape) or plainly(*a))
    x, mask, pair = random(1, 20, 2, 20, 160), random(20, 1, 1, 160), random(1, 2, 20, 160)
    mask[:, 0, 0, 140:] = -torch.inf
    mask[3] = torch.finfo(torch.float32).min  # a row that sees nothing but evenly, as in eager
    mask[4] = -torch.inf
    want = torch.softmax(0.3 * x + mask + pair, -1).nan_to_num(0.0)
    for view in (
        x,
        x.transpose(1, 3).contiguous().transpose(1, 3),
        x.transpose(2, 4).contiguous().transpose(2, 4),
    ):
        torch.testing.assert_close(kernel(0.3)(view, mask, pair), want)
        torch.testing.assert_close(kernel(0.3)(view, pair, mask), want)
    assert len(went) == 6
    x, mask, pair = (
        random(2, 3, 5, 8, 64),
        random(2, 1, 5, 1, 64),
        random(3, 1, 8, 64),
    )  # runs of 5, and two of them
    torch.testing.assert_close(kernel(0.3)(x, mask, pair), torch.softmax(0.3 * x + mask + pair, -1))
    assert len(went) == 7


@pytest.mark.parametrize("narrow", [16384, 16])
def test_masks_and_rows_without_a_place(narrow, monkeypatch):
    from cai_kernels.softmax import triton

    monkeypatch.setattr(triton, "NARROW", narrow)
    monkeypatch.setattr(triton, "WIDE_BLOCK", 16)
    x, dy = random(3, 4, 37), random(3, 4, 37).flip(0)
    mask = random(4, 37) > 0
    mask[1] = False
    for m in (mask, mask.t().contiguous().t(), mask[2:3], (random(3, 1, 1) > -9)):
        assert_no_less_exact(kernel(mask=m), plain(mask=m), (x,), (dy,), floor=cancelled(dy))
    y = kernel(mask=mask)(x)
    assert (y[:, 1] == 0).all() and not y.isnan().any()
    open_rows = [0, 2, 3]
    want = torch.softmax(x.masked_fill(~mask, -torch.inf), -1)[:, open_rows]
    torch.testing.assert_close(y[:, open_rows], want)
    torch.testing.assert_close(softmax(x, mask=mask)[:, open_rows], want)


@pytest.mark.parametrize("shape", [(2, 5, 5), (2, 3, 7), (2, 7, 3)])
def test_causal(shape):
    x, dy = random(*shape), random(*shape).flip(0)
    assert_no_less_exact(kernel(causal=True), plain(causal=True), (x,), (dy,), floor=cancelled(dy))
    seen = torch.ones(shape[1:], dtype=torch.bool).tril(shape[2] - shape[1])
    want = torch.softmax(x.cpu().masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
    torch.testing.assert_close(kernel(causal=True)(x).cpu(), want)
    torch.testing.assert_close(softmax(x.cpu(), causal=True), want)


def test_strided_inputs_and_another_dtype():
    x, dy = random(4, 6, 21), random(4, 6, 21).flip(0)
    bias = random(6, 21)
    want = results(plain(), (x, bias), (dy,))
    for view in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        leaf = view.detach().requires_grad_()
        y = kernel()(leaf, bias.t().contiguous().t())
        got = [y.detach(), *torch.autograd.grad(y, leaf, dy.transpose(0, 1).contiguous().transpose(0, 1))]
        torch.testing.assert_close(got, want[:2])
    half = random(4, 6, 21, dtype=torch.bfloat16)
    assert kernel(dtype=torch.float32)(half).dtype == torch.float32
    assert_no_less_exact(kernel(dtype=torch.float32), plain(dtype=torch.float32), (half.float(),), (dy,))
    assert results(kernel(dtype=torch.float32), (half,), (dy,))[1].dtype == torch.bfloat16


def test_gradients_are_only_made_where_they_are_needed():
    x, bias, dy = random(4, 6, 21), random(6, 21), random(4, 6, 21).flip(0)
    want = results(plain(), (x, bias), (dy,))
    assert_gradients_alone(kernel(), (x, bias), dy, want[1:])


def test_large_values_stay_finite():
    x = torch.tensor([[1e30, -1e30, 3e38, 0.0]], device=DEVICE)
    torch.testing.assert_close(kernel()(x), torch.softmax(x, -1))


def test_the_same_run_twice_is_the_same():
    inputs, dy = (random(33, 7, 77, dtype=torch.bfloat16), random(7, 77)), random(33, 7, 77)
    assert_the_same_twice(kernel(), inputs, (dy,))


def test_reference_gradients():
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (3, 4), (2, 1, 1))]
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    assert torch.autograd.gradcheck(plain(0.5, mask, True), inputs)
    torch.testing.assert_close(softmax(inputs[0]), torch.softmax(inputs[0], -1))


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.softmax import triton

    x, bias = random(2, 3, 16).requires_grad_(), random(3, 16).requires_grad_()
    mask = random(3, 16) > -1
    torch.library.opcheck(triton.softmax, (x, bias, None, mask, 0.5, True, torch.float32))
    torch.library.opcheck(triton.softmax, (x, None, None, None, 1.0, False, torch.float32))
    compiled = torch.compile(lambda a, b: kernel()(a, b) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, bias), kernel()(x, bias) * 2)


def test_errors_name_the_argument():
    x = random(4, 6, 21)
    with pytest.raises(KernelError, match="mask does not fit x"):
        softmax(x, mask=x[:, :3] > 0)
    with pytest.raises(KernelError, match="mask has an unsupported dtype"):
        softmax(x, mask=x)
    with pytest.raises(KernelError, match="bias does not fit x"):
        softmax(x, bias=x[None])
    with pytest.raises(KernelError, match="bias has an unsupported dtype"):
        softmax(x, bias=x > 0)
    with pytest.raises(KernelError, match="bias is on another device"):
        softmax(x, bias=x.to("meta"))
    with pytest.raises(KernelError, match="too many biases"):
        softmax(x, bias=(x, x, x))
    with pytest.raises(KernelError, match="x has too few dims"):
        softmax(x[0, 0], causal=True)
    with pytest.raises(KernelError, match="x has too many dims"):
        softmax(x[None, None, None], backend="triton")
    with pytest.raises(KernelError, match="unsupported dtype of the result"):
        softmax(x, dtype=torch.int32)
