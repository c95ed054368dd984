"""Cases of add_rms_norm: what stands between two blocks of a transformer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case

from cai_kernels import add_rms_norm


def make(rows: int, columns: int):
    def inputs(device: torch.device) -> tuple:
        x, residual = (
            torch.randn(rows, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        weight = torch.randn(columns, device=device, dtype=torch.bfloat16, requires_grad=True)
        return x, residual, weight

    return inputs


def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    wide = total.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), total


def liger():
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda x, residual, weight: liger_fused_add_rms_norm(x, residual, weight, 1e-6)


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(32, 64)] if tiny else [(16384, 8192), (8192, 4096), (32768, 2048), (8192, 16384)]
    for rows, columns in sizes:
        tensor = rows * columns * 2
        yield Case(
            op="add_rms_norm",
            shape=f"{rows}x{columns}",
            make=make(rows, columns),
            ours=add_rms_norm,
            eager=eager,
            liger=liger,
            forward_bytes=4 * tensor,
            backward_bytes=4 * tensor,
        )
