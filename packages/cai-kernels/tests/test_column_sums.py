"""What the rooms share: column sums of partial results, tensors as rows."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE

from cai_kernels.rows import as_rows


@pytest.mark.parametrize("shape", [(300, 45), (1, 7), (3, 1500), (8, 700), (128, 1), (0, 5), (5, 0)])
def test_column_sums(shape):
    from cai_kernels.column_sums import column_sums

    partial = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for dtype in (torch.float32, torch.float16):
        got = column_sums(partial, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, partial.sum(0).to(dtype), rtol=1e-3, atol=1e-5)
        assert torch.equal(got, column_sums(partial, dtype))


def test_several_sums_in_one_launch():
    from cai_kernels.column_sums import column_sums_into

    partials = torch.randn(2, 5, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    outs = [torch.empty(70, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)]
    column_sums_into(partials, outs)
    for out, partial in zip(outs, partials, strict=True):
        torch.testing.assert_close(out, partial.sum(0).to(out.dtype), rtol=1e-2, atol=1e-5)


def test_rows_are_a_view_where_strides_allow_it():
    x = torch.randn(2, 3, 8)
    packed = x[..., :4]
    for tensor, copied in ((x, False), (packed, False), (x[..., ::2], True), (x.transpose(0, 1), True)):
        rows = as_rows(tensor)
        assert torch.equal(rows, tensor.reshape(6, -1))
        assert rows.stride(1) == 1
        assert (rows.data_ptr() != tensor.data_ptr()) == copied
