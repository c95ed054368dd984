"""Cross-entropy of a vocabulary's logits, in float32, ignoring nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from case import Case
from torch.nn import functional as F

from cai_kernels import cross_entropy


def eager(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), target)


def liger():
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(16, 64)] if tiny else [(8192, 128256), (16384, 32000), (8192, 151936), (4096, 128256)]
    for tokens, vocab in sizes:

        def make(device: torch.device, tokens: int = tokens, vocab: int = vocab) -> tuple:
            logits = torch.randn(tokens, vocab, device=device, dtype=torch.bfloat16, requires_grad=True)
            return logits, torch.randint(0, vocab, (tokens,), device=device)

        size = 2 * tokens * vocab
        yield Case(
            "cross_entropy",
            f"{tokens}x{vocab}",
            make,
            ours=cross_entropy,
            eager=eager,
            liger=liger,
            forward_bytes=size,
            backward_bytes=2 * size,
            others={"inplace": functools.partial(cross_entropy, inplace_backward=True)},
        )
