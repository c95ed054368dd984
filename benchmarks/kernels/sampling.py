"""Cases of sample: a step of decoding, beside a sort and torch.multinomial."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from case import Case

from cai_kernels import sample

LIMITS = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def eager_plain(logits: torch.Tensor) -> torch.Tensor:
    probabilities = torch.softmax(logits.float() / LIMITS["temperature"], -1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)


def eager_filtered(logits: torch.Tensor) -> torch.Tensor:
    z, order = (logits.float() / LIMITS["temperature"]).sort(-1, descending=True)
    z = z.masked_fill(z < z[:, LIMITS["top_k"] - 1, None], -torch.inf)
    probabilities = torch.softmax(z, -1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= LIMITS["top_p"], 0.0)
    drawn = (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)
    return order.gather(1, drawn[:, None])[:, 0]


def make(rows: int, columns: int) -> Callable:
    return lambda device: (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 3,)


def cases(tiny: bool) -> Iterator[Case]:
    for rows, columns in [(2, 64)] if tiny else [(1, 128256), (64, 128256), (512, 151936)]:
        for op, limits, eager in (
            ("sample", {"temperature": LIMITS["temperature"]}, eager_plain),
            ("sample top-k top-p", LIMITS, eager_filtered),
        ):
            yield Case(
                op,
                f"{rows}x{columns}",
                make(rows, columns),
                ours=lambda logits, limits=limits: sample(logits, **limits),
                eager=eager,
                forward_bytes=2 * rows * columns,
            )
