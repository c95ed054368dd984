"""The head of a language model and its loss.

`chunks` sums the weight's gradient over chunks of tokens in a float32 buffer, whichever form costs less memory;
`weight` sums in the weight's dtype; sizes are of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from case import Case
from torch.nn import functional as F

from cai_kernels import linear_cross_entropy
from cai_kernels.linear_cross_entropy import slice_plan


def eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def coarse(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, target, accumulate="weight")


def chunks(size: int = 512 << 20) -> Callable:
    def call(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(slice_plan, "saves_memory", return_value=False):
            return linear_cross_entropy(x, weight, target, chunk_bytes=size)

    return call


def coarse_small(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, target, accumulate="weight", chunk_bytes=256 << 20)


def liger():
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(16, 8, 64)] if tiny else [(8192, 4096, 128256), (8192, 8192, 128256), (16384, 2048, 128256)]
    for tokens, width, vocab in sizes:

        def make(device: torch.device, tokens: int = tokens, width: int = width, vocab: int = vocab) -> tuple:
            def bf16(*shape: int) -> torch.Tensor:
                return torch.randn(*shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

            x, weight = bf16(tokens, width).requires_grad_(), bf16(vocab, width).requires_grad_()
            return x, weight, torch.randint(0, vocab, (tokens,), device=device)

        yield Case(
            "linear_cross_entropy",
            f"{tokens}x{width}x{vocab}",
            make,
            ours=linear_cross_entropy,
            eager=eager,
            liger=liger,
            forward_flops=2 * tokens * width * vocab,
            backward_flops=4 * tokens * width * vocab,
            others={
                "weight": coarse,
                "weight 256 MiB": coarse_small,
                "chunks": chunks(),
                "chunks 1 GiB": chunks(1 << 30),
            },
        )
