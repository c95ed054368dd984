"""Cases of embedding: backward writes the whole dense gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import embedding


def cases(tiny: bool) -> Iterator[Case]:
    for tokens, vocabulary, width in (
        [(32, 64, 16)] if tiny else [(16384, 128256, 4096), (32768, 32000, 2048)]
    ):

        def make(device: torch.device, tokens=tokens, vocabulary=vocabulary, width=width) -> tuple:
            weight = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            # A few ids are most of a text.
            share = torch.rand(tokens, device=device) ** 4
            return weight, (share * vocabulary).long()

        size = 2 * tokens * width
        yield Case(
            "embedding",
            f"{tokens} of {vocabulary}x{width}",
            make,
            ours=lambda weight, ids: embedding(ids, weight),
            eager=lambda weight, ids: F.embedding(ids, weight),
            forward_bytes=2 * size,
            backward_bytes=size + 2 * vocabulary * width,
        )
