"""Cases of layer_norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import layer_norm


def make(rows: int, columns: int):
    def inputs(device: torch.device) -> tuple:
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight, bias = (
            torch.randn(columns, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        return x, weight, bias

    return inputs


def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def liger():
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: liger_layer_norm(x, weight, bias, 1e-5)


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(32, 64)] if tiny else [(16384, 8192), (8192, 4096), (32768, 2048), (8192, 16384)]
    for rows, columns in sizes:
        tensor = rows * columns * 2
        yield Case(
            op="layer_norm",
            shape=f"{rows}x{columns}",
            make=make(rows, columns),
            ours=layer_norm,
            eager=eager,
            liger=liger,
            forward_bytes=2 * tensor,
            backward_bytes=3 * tensor,
        )
