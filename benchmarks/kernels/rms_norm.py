"""RMSNorm as LLaMA computes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case

from cai_kernels import rms_norm


def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def liger():
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight: liger_rms_norm(x, weight, 1e-5)


def cases(tiny: bool) -> Iterator[Case]:
    for tokens, width in (
        [(32, 64)] if tiny else [(16384, 8192), (8192, 4096), (32768, 2048), (8192, 16384), (524288, 128)]
    ):

        def make(device: torch.device, tokens: int = tokens, width: int = width) -> tuple:
            x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            return x, torch.rand(width, device=device, dtype=torch.bfloat16).requires_grad_()

        size = 2 * tokens * width
        yield Case(
            "rms_norm",
            f"{tokens}x{width}",
            make,
            ours=lambda x, weight: rms_norm(x, weight, 1e-5),
            eager=eager,
            liger=liger,
            forward_bytes=2 * size,
            backward_bytes=3 * size,
        )
