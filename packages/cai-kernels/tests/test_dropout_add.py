"""Dropout with a residual sum: the mask is a function of the seed, and forward and backward agree on it."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DTYPES, SHAPES

from cai_kernels import KernelError, dropout_add
from cai_kernels.dropout_add import reference
from cai_kernels.testing import assert_no_less_exact, results

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensors(shape, dtype=torch.float32):
    random = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=random).to(DEVICE, dtype) for _ in range(3)]


def mask(shape, p, seed):
    from cai_kernels.dropout_add import triton

    return triton.dropout_mask(shape, p, seed, DEVICE)


def kernel(p=0.3, seed=7):
    return lambda x, residual: dropout_add(x, residual, p, seed=seed, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype):
    x, residual, dy = tensors(shape, dtype)
    kept = mask(shape, 0.3, 7)

    def plain(a, b):
        return reference.dropout_add(a, b, kept, 0.3)

    assert_no_less_exact(kernel(), plain, (x, residual), (dy,))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p):
    count = 60_000
    sigma = (p * (1 - p) / count) ** 0.5
    kept = mask((count,), p, 11)
    drawn = reference.dropout_mask(torch.zeros(count, device=DEVICE), p, torch.tensor(11))
    for made in (kept, drawn):
        assert abs(made.double().mean() - (1 - p)) < 5 * sigma
    # Neighbours, and the four values of one block of random bits, are independent.
    for step in (1, 2, 3, 4, 1024):
        both = (kept[step:] & kept[:-step]).double().mean()
        assert abs(both - (1 - p) ** 2) < 8 * sigma, step


def test_the_seed_decides():
    x, residual, _ = tensors((20, 50))
    for backend in ("triton", "reference"):
        one, same, other = (dropout_add(x, residual, 0.5, seed=s, backend=backend) for s in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        given = dropout_add(x, residual, 0.5, seed=torch.tensor(1, device=DEVICE), backend=backend)
        assert torch.equal(one, given)
        drawn = []
        for start in (3, 3, 4):
            torch.manual_seed(start)
            drawn.append(dropout_add(x, residual, 0.5, backend=backend))
            drawn.append(dropout_add(x, residual, 0.5, backend=backend))
        assert torch.equal(drawn[0], drawn[2])
        assert torch.equal(drawn[1], drawn[3])
        assert not torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[4])
    assert torch.equal(mask((6, 40), 0.5, 9).flatten(), mask((240,), 0.5, 9))
    assert not torch.equal(mask((240,), 0.5, 9), mask((240,), 0.5, 9 + 2**32))


def test_nothing_or_all_is_dropped():
    x, residual, dy = tensors((6, 40))
    for backend in ("triton", "reference"):
        torch.testing.assert_close(dropout_add(x, residual, 0.0, backend=backend), residual + x)
        plain = dropout_add(x, residual, 0.9, training=False, backend=backend)
        torch.testing.assert_close(plain, residual + x)

        def all_dropped(a, b, backend=backend):
            return dropout_add(a, b, 1.0, seed=1, backend=backend)

        y, dx, dresidual = results(all_dropped, (x, residual), (dy,))
        assert torch.equal(y, residual)
        assert (dx == 0).all()
        assert torch.equal(dresidual, dy)


def test_strided_inputs_and_gradients_where_they_are_needed():
    x, residual, dy = tensors((6, 40))
    want = results(kernel(), (x, residual), (dy,))
    strided = x.t().contiguous().t().detach().requires_grad_()
    y = kernel()(strided, torch.cat((residual, residual), -1)[:, :40])
    torch.testing.assert_close(y.detach(), want[0])
    torch.testing.assert_close(torch.autograd.grad(y, strided, dy.t().contiguous().t())[0], want[1])
    residual.requires_grad_()
    kernel()(x, residual).backward(dy)
    torch.testing.assert_close(residual.grad, dy)


def test_reference_gradients():
    x, residual = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kept = torch.rand(3, 4) > 0.4
    assert torch.autograd.gradcheck(lambda a, b: reference.dropout_add(a, b, kept, 0.4), (x, residual))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_op_is_clean_for_the_compiler(backend):
    from cai_kernels.dropout_add import triton

    x, residual = (t.requires_grad_() for t in tensors((3, 40))[:2])
    seed = torch.full((), 5, device=DEVICE)
    torch.library.opcheck(triton.dropout_add, (x, residual, 0.4, seed))
    torch.library.opcheck(triton.dropout, (x, 0.4, seed))
    torch.library.opcheck(reference.dropout_mask, (x.detach(), 0.4, seed))

    def twice(a, b):
        return dropout_add(a, b, 0.4, seed=5, backend=backend) * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual), twice(x, residual))
    drawn = torch.compile(
        lambda a, b: dropout_add(a, b, 0.4, backend=backend), fullgraph=True, backend="aot_eager"
    )
    assert not torch.equal(drawn(x, residual), drawn(x, residual))


def test_errors_name_the_argument():
    x, residual, _ = tensors((4, 33))
    with pytest.raises(KernelError, match="residual does not fit x"):
        dropout_add(x, residual[:2], 0.1)
    with pytest.raises(KernelError, match="residual has an unsupported dtype"):
        dropout_add(x, residual.half(), 0.1)
    with pytest.raises(KernelError, match="p is no probability"):
        dropout_add(x, residual, 1.5)
    with pytest.raises(KernelError, match="seed is not one number"):
        dropout_add(x, residual, 0.1, seed=torch.zeros(2, dtype=torch.int64, device=DEVICE))
    with pytest.raises(KernelError, match="seed has an unsupported dtype"):
        dropout_add(x, residual, 0.1, seed=torch.zeros((), device=DEVICE))
    with pytest.raises(KernelError, match="seed does not fit 64 bits"):
        dropout_add(x, residual, 0.1, seed=2**63)
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        dropout_add(x.int(), residual, 0.1)
