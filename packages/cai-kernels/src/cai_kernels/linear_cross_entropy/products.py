"""The matrix product that the chunked and the sliced form share."""

from __future__ import annotations

import torch


def accumulate(total: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, *, overwrite: bool) -> None:
    """Add lhs @ rhs to `total`, or overwrite it. A float32 total of narrower factors is exact to float32."""
    if total.dtype == rhs.dtype:
        torch.mm(lhs, rhs, out=total) if overwrite else total.addmm_(lhs, rhs)
    elif total.is_cuda and total.dtype == torch.float32:
        if overwrite:
            torch.mm(lhs, rhs, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, lhs, rhs, out_dtype=torch.float32, out=total)
    else:
        lhs, rhs = lhs.to(total.dtype), rhs.to(total.dtype)
        torch.mm(lhs, rhs, out=total) if overwrite else total.addmm_(lhs, rhs)
