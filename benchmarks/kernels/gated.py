"""Cases of swiglu, geglu and sigmoid_gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import geglu, sigmoid_gate, swiglu


def make(rows: int, columns: int, count: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        return tuple(
            torch.randn(rows, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(count)
        )

    return inputs


def packed(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def liger_swiglu():
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu


def liger_geglu():
    from liger_kernel.transformers.functional import liger_geglu

    return liger_geglu


def cases(tiny: bool) -> Iterator[Case]:
    forms = [
        ("swiglu", swiglu, lambda gate, up: F.silu(gate) * up, liger_swiglu),
        ("geglu", geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, liger_geglu),
        ("sigmoid_gate", sigmoid_gate, lambda x, gate: x * torch.sigmoid(gate), None),
    ]
    sizes = [(32, 64)] if tiny else [(16384, 14336), (16384, 8192)]
    for op, ours, eager, liger in forms:
        for rows, columns in sizes:
            size, shape = 2 * rows * columns, f"{rows}x{columns}"
            yield Case(op, shape, make(rows, columns, 2), ours, eager, liger, 3 * size, 5 * size)
    rows, columns = sizes[0]
    size = 2 * rows * columns
    yield Case(
        "swiglu packed",
        f"{rows}x{columns}",
        make(rows, 2 * columns, 1),
        swiglu,
        packed,
        None,
        3 * size,
        5 * size,
    )
