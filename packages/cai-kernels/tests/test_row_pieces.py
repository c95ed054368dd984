"""Backward of rows held in pieces: as exact as eager torch, for every norm, and each run the same."""

from __future__ import annotations

import pytest
import torch

from cai_kernels import add_rms_norm, layer_norm, rms_norm, row_norm, row_pieces
from cai_kernels.add_rms_norm import reference as add_reference
from cai_kernels.layer_norm import reference as layer_reference
from cai_kernels.rms_norm import reference as rms_reference
from cai_kernels.testing import assert_no_less_exact, results

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small(monkeypatch) -> list[int]:
    """Pieces of 32 columns in rows of up to 256; lists the columns of the rows that went by pieces."""
    monkeypatch.setattr(row_norm, "NARROW", 256)
    monkeypatch.setattr(row_pieces, "PIECE", 32)
    run, went = row_pieces.backward, []

    def backward(dy, x, *others):
        went.append(x.shape[1])
        return run(dy, x, *others)

    monkeypatch.setattr(row_pieces, "backward", backward)
    return went


def tensors(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, residual, weight, bias, and gradients of two outputs."""
    random = torch.Generator().manual_seed(columns)
    shapes = [(rows, columns), (rows, columns), (columns,), (columns,), (rows, columns), (rows, columns)]
    return [(1 + torch.randn(shape, generator=random)).to(DEVICE, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [80, 128, 240, 256])
@pytest.mark.parametrize("rows", [1, 19])
def test_layer_norm(rows, columns, dtype, small):
    x, _, weight, bias, dy, _ = tensors(rows, columns, dtype)
    assert_no_less_exact(
        lambda *a: layer_norm(*a, backend="triton"),
        lambda *a: layer_reference.layer_norm(*a, 1e-5),
        (x, weight, bias),
        (dy,),
    )
    assert small == [columns]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_rms_norm_of_an_uneven_row(casting, dtype, small):
    x, _, weight, _, dy, _ = tensors(19, 208, dtype)
    assert_no_less_exact(
        lambda *a: rms_norm(*a, casting=casting, backend="triton"),
        lambda *a: rms_reference.rms_norm(*a, 1e-6, casting),
        (x, weight),
        (dy,),
    )
    assert small == [208]


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_the_gradient_of_the_sum(dtype, small):
    x, residual, weight, _, dy, dsum = tensors(19, 240, dtype)
    residual = ((x + residual).double() - x.double()).to(dtype)  # a sum that needs no rounding
    assert_no_less_exact(
        lambda *a: add_rms_norm(*a, backend="triton"),
        lambda *a: add_reference.add_rms_norm(*a, 1e-6, "llama"),
        (x, residual, weight),
        (dy, dsum),
    )
    assert small == [240]


def test_without_parameters_and_only_what_is_wanted(small):
    x, _, weight, bias, dy, _ = tensors(7, 240, torch.bfloat16)
    whole = results(lambda *a: layer_norm(*a, backend="triton"), (x, weight, bias), (dy,))
    again = results(lambda *a: layer_norm(*a, backend="triton"), (x, weight, bias), (dy,))
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one, other)
    (dx,) = results(lambda a: layer_norm(a, weight, bias, backend="triton"), (x,), (dy,))[1:]
    assert torch.equal(dx, whole[1]) and small == [240] * 3
    dw, db = results(lambda w, b: layer_norm(x, w, b, backend="triton"), (weight, bias), (dy,))[1:]
    torch.testing.assert_close((dw, db), (whole[2], whole[3]))
    assert small == [240] * 3  # without a gradient of x the rows are read once anyway
    assert_no_less_exact(
        lambda a: layer_norm(a, backend="triton"),
        lambda a: layer_reference.layer_norm(a, None, None, 1e-5),
        (x,),
        (dy,),
    )


def test_strided_rows(small):
    x, _, weight, bias, dy, _ = tensors(7, 240, torch.bfloat16)
    packed = torch.cat([x, dy], 1)
    plain = results(lambda *a: layer_norm(*a, backend="triton"), (x, weight, bias), (dy,))
    x_view = packed[:, :240].requires_grad_()
    y = layer_norm(x_view, weight, bias, backend="triton")
    (dx,) = torch.autograd.grad(y, x_view, packed[:, 240:])
    assert torch.equal(dx, plain[1]) and small == [240, 240]


def test_rows_that_pieces_do_not_take():
    x, _, _, _, dy, dsum = tensors(3, 240, torch.bfloat16)
    assert row_pieces.takes(dy, x, None) and row_pieces.takes(dy, x, dsum)
    for other in (
        (dy.float(), x, None),
        (dy.float(), x.float(), None),
        (dy[:, :239], x[:, :239], None),
        (dy[:, :32], x[:, :32], None),
        (dy, x, torch.zeros(3, 250, dtype=x.dtype)[:, :240]),
    ):
        assert not row_pieces.takes(*other)
