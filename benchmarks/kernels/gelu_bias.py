"""Cases of gelu_bias: the MLP activation of GPT-2 and BERT."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import gelu_bias


def cases(tiny: bool) -> Iterator[Case]:
    for rows, columns in [(32, 64)] if tiny else [(32768, 8192), (16384, 16384)]:

        def make(device: torch.device, rows: int = rows, columns: int = columns) -> tuple:
            x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
            return x, torch.randn(columns, device=device, dtype=torch.bfloat16, requires_grad=True)

        size = 2 * rows * columns
        yield Case(
            "gelu_bias",
            f"{rows}x{columns}",
            make,
            ours=gelu_bias,
            eager=lambda x, bias: F.gelu(x + bias),
            forward_bytes=2 * size,
            backward_bytes=3 * size,
        )
