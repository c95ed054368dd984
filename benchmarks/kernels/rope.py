"""Cases of rope: LLaMA's rotary embedding, heads as Hugging Face hands them over."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case

from cai_kernels import rope


def half_turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def eager(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + half_turn(q) * sin, k * cos + half_turn(k) * sin


def liger():
    from liger_kernel.transformers.functional import liger_rope

    # It writes over what it is given.
    return lambda q, k, cos, sin: liger_rope(q, k, cos, sin)


def cases(tiny: bool) -> Iterator[Case]:
    sizes = (
        [(1, 16, 4, 2, 16)]
        if tiny
        else [(4, 4096, 32, 8, 128), (4, 4096, 32, 32, 128), (2, 8192, 64, 8, 128)]
    )
    for batch, length, q_heads, k_heads, size in sizes:

        def make(
            device: torch.device, batch=batch, length=length, heads=(q_heads, k_heads), size=size
        ) -> tuple:
            q, k = (
                torch.randn(batch, length, n, size, device=device, dtype=torch.bfloat16)
                .transpose(1, 2)
                .requires_grad_()
                for n in heads
            )
            angle = torch.arange(length, device=device)[:, None] * 1e4 ** (
                -torch.arange(0, size, 2, device=device) / size
            )
            angle = torch.cat((angle, angle), -1)[None]
            return q, k, angle.cos().to(q.dtype), angle.sin().to(q.dtype)

        moved = 2 * 2 * batch * length * (q_heads + k_heads) * size
        yield Case(
            "rope",
            f"{batch}x{length}, {q_heads}+{k_heads} heads of {size}",
            make,
            ours=rope,
            eager=eager,
            liger=liger,
            forward_bytes=moved,
            backward_bytes=moved,
        )
