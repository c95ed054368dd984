"""Cases of modulate and gate_add: tokens of DiT-XL/2 and SD3.

The floor: modulate moves 4 bytes a value of bfloat16 forward (x, y) and 6 backward (dy, x, dx); gate_add 6 forward
(residual, x, y) and 6 backward (dy, x, dx; the residual's gradient is dy). What there is a sample is small beside it.
Plain torch writes the normalized rows and both products apart: 16 bytes forward for modulate, 10 for the gate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import gate_add, modulate


def make(samples: int, tokens: int, columns: int, whole: int, of_samples: int):
    def inputs(device: torch.device) -> tuple:
        options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
        return (
            *(torch.randn(samples, tokens, columns, **options) for _ in range(whole)),
            *(torch.randn(samples, columns, **options) for _ in range(of_samples)),
        )

    return inputs


def plain_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def plain_gate(residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return residual + gate[:, None] * x


def cases(tiny: bool) -> Iterator[Case]:
    for samples, tokens, columns in (
        [(2, 8, 64)] if tiny else [(64, 256, 1152), (16, 1024, 1536), (4, 4096, 2432)]
    ):
        tensor, shape = samples * tokens * columns * 2, f"{samples}x{tokens}x{columns}"
        inputs = make(samples, tokens, columns, 1, 2)
        yield Case("modulate", shape, inputs, modulate, plain_modulate, None, 2 * tensor, 3 * tensor)
        inputs = make(samples, tokens, columns, 2, 1)
        yield Case("gate_add", shape, inputs, gate_add, plain_gate, None, 3 * tensor, 3 * tensor)
