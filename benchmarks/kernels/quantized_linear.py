"""Linear layers with weights in 4 and 8 bits; eager is a weight in bfloat16.

From one row, a token that is generated, to those of a step that trains. `tiles` and `memory` are the two forms of our
product, whichever would be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from case import Case

from cai_kernels import QuantizedKind, quantize, quantized_linear
from cai_kernels.quantized_linear import triton

FORMS = {"tiles": 1 << 30, "memory": 0}
"""The most rows of a product that makes its weight in tiles."""


def form(kind: QuantizedKind, few_rows: int | None = None) -> Callable:
    def run(x: torch.Tensor, weight: torch.Tensor, *stored: torch.Tensor) -> torch.Tensor:
        codes, scales = stored[:2] if kind == "nf4" else stored[2:]
        if few_rows is None:
            return quantized_linear(x, codes, scales, kind=kind)
        with mock.patch.object(triton, "FEW_ROWS", dict.fromkeys(triton.FEW_ROWS, few_rows)):
            return quantized_linear(x, codes, scales, kind=kind)

    return run


def cases(tiny: bool) -> Iterator[Case]:
    inner, outer = (64, 32) if tiny else (4096, 14336)
    for rows in (1, 16) if tiny else (1, 16, 64, 256, 4096):

        def make(device: torch.device, rows: int = rows) -> tuple:
            x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, requires_grad=rows > 256)
            weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) / inner**0.5
            return x, weight, *quantize(weight, "nf4"), *quantize(weight, "int8")

        yield Case(
            "quantized_linear",
            f"{rows}x{inner}x{outer}",
            make,
            ours=form("nf4"),
            eager=lambda x, weight, *_: torch.matmul(x, weight.t()),
            forward_bytes=inner * outer * 9 // 16 + 2 * rows * (inner + outer),
            forward_flops=2 * rows * inner * outer,
            backward_flops=2 * rows * inner * outer,
            others={
                **{f"nf4 {name}": form("nf4", most) for name, most in FORMS.items()},
                "int8": form("int8"),
                **{f"int8 {name}": form("int8", most) for name, most in FORMS.items()},
            },
        )
