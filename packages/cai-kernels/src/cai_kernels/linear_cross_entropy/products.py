"""The matrix product that the chunked and the sliced form share."""

from __future__ import annotations

import torch


def accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, overwrite: bool) -> None:
    """Add left @ right to `total`, or overwrite it. A float32 total of narrower factors is exact to float32."""
    if total.dtype == right.dtype:
        torch.mm(left, right, out=total) if overwrite else total.addmm_(left, right)
    elif total.is_cuda and total.dtype == torch.float32:
        if overwrite:
            torch.mm(left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        left, right = left.to(total.dtype), right.to(total.dtype)
        torch.mm(left, right, out=total) if overwrite else total.addmm_(left, right)
