"""Cases of dropout_add: the residual sum of a transformer that is trained with dropout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import dropout_add


def cases(tiny: bool) -> Iterator[Case]:
    for rows, columns in [(32, 64)] if tiny else [(16384, 8192), (16384, 4096)]:

        def make(device: torch.device, rows: int = rows, columns: int = columns) -> tuple:
            return tuple(
                torch.randn(rows, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(2)
            )

        size = 2 * rows * columns
        yield Case(
            "dropout_add",
            f"{rows}x{columns}",
            make,
            ours=lambda x, residual: dropout_add(x, residual, 0.1),
            eager=lambda x, residual: residual + F.dropout(x, 0.1),
            forward_bytes=3 * size,
            backward_bytes=2 * size,
        )
