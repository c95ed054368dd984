"""Quantised blocks against a scalar reference: error bounds, exact cases, non-finite numbers, shapes."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh.errors import PlanError
from cai_zero.reduction.quantization import DTYPES, ERROR, LARGEST, dequantize, quantize

FORMS = ("int8", "fp8")
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def there_and_back(x, form, block):
    return dequantize(*quantize(x, form, block), torch.empty_like(x), block)


def e4m3_values():
    """All non-negative numbers of float8 e4m3 (fn), from its definition: bias 7, no infinities, one NaN."""
    found = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        found.append(mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return found


def reference(values, form, block):
    """Every element of a list by scalar arithmetic, block for block."""
    grid = [float(i) for i in range(128)] if form == "int8" else e4m3_values()
    out = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = max(struct.unpack("f", struct.pack("f", max(map(abs, part)) / grid[-1]))[0], 2.0**-126)
        for value in part:
            code = min(grid, key=lambda g: abs(g - abs(value) / scale))
            out.append(math.copysign(code * scale, value))
    return out


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=40), block=st.integers(1, 16))
def test_error_is_bounded_by_the_largest_of_the_block(form, values, block):
    x = torch.tensor(values, dtype=torch.float64)
    got = there_and_back(x, form, block)
    for start in range(0, len(values), block):
        part, back = x[start : start + block], got[start : start + block]
        bound = ERROR[form] * float(part.abs().max()) * (1 + 1e-6) + 1e-37
        assert float((part - back).abs().max()) <= bound


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=20), block=st.integers(1, 8))
def test_codes_are_the_nearest(form, values, block):
    """Against the reference, which may only take the other of two codes that are equally near."""
    x = torch.tensor(values, dtype=torch.float64)
    got, expected = there_and_back(x, form, block), torch.tensor(reference(values, form, block)).double()
    mine, theirs = (got - x).abs(), (expected - x).abs()
    assert torch.all(mine <= theirs * (1 + 1e-5) + 1e-5 * x.abs() + 1e-37)


def test_fp8_keeps_small_numbers_that_int8_loses():
    x = torch.tensor([1.0, 1e-3, 3e-4])
    assert there_and_back(x, "int8", 3)[1:].tolist() == [0.0, 0.0]
    back = there_and_back(x, "fp8", 3)
    assert torch.allclose(back, x, rtol=1 / 16, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_are_codes_come_back_exactly(form):
    positive = torch.arange(128.0) if form == "int8" else torch.tensor(e4m3_values())
    x = torch.cat([positive, -positive]) * 2.0**-20
    codes, scales = quantize(x, form, 1024)
    assert codes.dtype == DTYPES[form]
    assert scales.dtype == torch.float32
    assert scales.tolist() == [2.0**-20]
    assert torch.equal(dequantize(codes, scales, torch.empty_like(x), 1024), x)
    assert float(codes.float().abs().max()) == LARGEST[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_rounded_once(form, dtype):
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales = quantize(x, form, 128)
    wide = dequantize(codes, scales, torch.empty_like(x, dtype=torch.float64), 128)
    out = dequantize(codes, scales, torch.empty_like(x), 128)
    assert torch.equal(out, wide.float().to(dtype) if dtype != torch.float64 else wide)
    assert torch.equal(quantize(x.double(), form, 128)[0].float(), codes.float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_what_is_not_finite_stays_so_and_stays_in_its_block(form, bad, dtype):
    for at in (0, 7, 15, 16, 33, 34):
        x = torch.linspace(-2.0, 2.0, 35).to(dtype)
        x[at] = bad
        back = there_and_back(x, form, 16)
        hit = torch.arange(35) // 16 == at // 16
        assert not back[hit].isfinite().any()
        assert back[~hit].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_the_smallest_numbers(form):
    x = torch.zeros(512)
    x[300] = 1e-40
    back = there_and_back(x, form, 256)
    assert torch.equal(back[:256], torch.zeros(256))
    assert float((back - x).abs().max()) <= 1e-39
    assert torch.equal(there_and_back(torch.zeros(0), form, 256), torch.zeros(0))


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_quantised_apart(form):
    x = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize(x, form, 16)
    assert (codes.shape, scales.shape) == ((3, 4, 50), (3, 4, 4))
    for i in range(3):
        for j in range(4):
            alone = quantize(x[i, j].clone(), form, 16)
            assert torch.equal(alone[0].float(), codes[i, j].float())
            assert torch.equal(alone[1], scales[i, j])
            assert torch.equal(there_and_back(x, form, 16)[i, j], there_and_back(x[i, j].clone(), form, 16))


def test_what_cannot_be_quantised():
    with pytest.raises(PlanError, match="unknown form"):
        quantize(torch.zeros(4), "int4", 4)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="at least one element"):
        quantize(torch.zeros(4), "int8", 0)
