"""Linear layers whose three matrix products are in FP8; eager is bfloat16.

The weight's cast is kept, as in the micro-batches of a step; `uncached` makes it in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from case import Case
from torch.nn import functional as F

from cai_kernels import WeightCache, fp8_linear


def form(scaling: Literal["tensor", "row", "block"], cached: bool = True, fast: bool = True) -> Callable:
    cache = WeightCache() if cached else None
    return lambda x, weight: fp8_linear(x, weight, scaling=scaling, weight_cache=cache, fast_accumulate=fast)


def cases(tiny: bool) -> Iterator[Case]:
    layers = [(4096, 4096), (4096, 14336), (14336, 4096), (4096, 6144)]
    sizes = [(32, 32, 16)] if tiny else [(8192, 8192, 8192), *((16384, *layer) for layer in layers)]
    for tokens, inner, outer in sizes:

        def make(device: torch.device, tokens: int = tokens, inner: int = inner, outer: int = outer) -> tuple:
            x = torch.randn(tokens, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) / inner**0.5
            return x, weight.requires_grad_()

        yield Case(
            "fp8_linear",
            f"{tokens}x{inner}x{outer}",
            make,
            ours=form("tensor"),
            eager=F.linear,
            forward_flops=2 * tokens * inner * outer,
            backward_flops=4 * tokens * inner * outer,
            others={
                "uncached": form("tensor", cached=False),
                "slow sums": form("tensor", fast=False),
                "row": form("row"),
                "block": form("block"),
            },
        )
