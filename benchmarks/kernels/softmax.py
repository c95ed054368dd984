"""Cases of softmax: plain rows, and AlphaFold's attention over pairs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case

from cai_kernels import softmax


def liger():
    from liger_kernel.transformers.functional import liger_softmax

    return liger_softmax


def cases(tiny: bool) -> Iterator[Case]:
    for rows, columns in [(32, 64)] if tiny else [(131072, 4096), (131072, 1024), (32768, 16384)]:

        def make(device: torch.device, rows: int = rows, columns: int = columns) -> tuple:
            return (torch.randn(rows, columns, device=device, dtype=torch.bfloat16, requires_grad=True),)

        size = 2 * rows * columns
        yield Case(
            "softmax",
            f"{rows}x{columns}",
            make,
            ours=softmax,
            eager=lambda x: torch.softmax(x, -1),
            liger=liger,
            forward_bytes=2 * size,
            backward_bytes=3 * size,
        )
    rows, heads, length = (2, 2, 8) if tiny else (256, 4, 384)

    def make_pairs(device: torch.device) -> tuple:
        x = torch.randn(
            1, rows, heads, length, length, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        mask = torch.randn(1, rows, 1, 1, length, device=device, dtype=torch.bfloat16)
        pair = torch.randn(
            1, 1, heads, length, length, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        return x, mask, pair

    size = 2 * rows * heads * length * length
    yield Case(
        "softmax with pair bias",
        f"1x{rows}x{heads}x{length}x{length}",
        make_pairs,
        ours=lambda x, mask, pair: softmax(x, scale=0.18, bias=(mask, pair)),
        eager=lambda x, mask, pair: torch.softmax(x * 0.18 + mask + pair, -1),
        forward_bytes=2 * size,
        backward_bytes=3 * size,
    )
