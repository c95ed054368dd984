"""Block-wise quantisation of tensors to one byte an element: the mathematics, which knows no rank.

Every block of consecutive elements is divided by its own scale, so that its largest magnitude becomes the largest
code, and rounded to the nearest code (block-wise quantisation as in Dettmers et al., arXiv:2110.02861, and ZeRO++,
Wang et al., arXiv:2306.10209). With `a` the largest magnitude of a block, the error of an element `x` is at most

- "int8": `a / 254`, half a step of 255 equal ones (`ERROR["int8"] * a`);
- "fp8": `|x| / 16` for normal codes of float8 e4m3, and `a / 448 / 1024` below them (at most `ERROR["fp8"] * a`).

A block that holds a NaN or an infinity has a scale that is not finite, so every element read back is NaN or infinite:
nothing that went wrong becomes a number again.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from cai_mesh.errors import PlanError

Form = Literal["int8", "fp8"]
BLOCK = 256
"""Elements that share a scale, unless told otherwise: the scales then take 1.6% of the codes' bytes."""

DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[str, float] = {"int8": 127.0, "fp8": 448.0}
ERROR: dict[str, float] = {"int8": 0.5 / 127, "fp8": 1 / 16}
"""Largest error of an element, as a fraction of its block's largest magnitude."""


def check_form(form: str) -> None:
    """Raise `PlanError` for a form that does not exist."""
    if form not in DTYPES:
        raise PlanError("unknown form of quantisation", got=repr(form), expected="'int8' or 'fp8'")


def quantize(x: torch.Tensor, form: Form, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the blocks of the last dimension.

    Args:
        x: [..., n], of any floating-point dtype, contiguous in its last dimension. The arithmetic is float32, or
            float64 for float64.
        form: "int8" (codes int8) or "fp8" (codes float8_e4m3fn).
        block: elements that share a scale; the last block of a row may be shorter.

    Returns codes [..., n] and float32 scales [..., ceil(n / block)]. Scales are at least the smallest normal float32,
    so blocks of zeros, and of numbers far below 1e-36, are read back as zeros.

    Raises `PlanError` for an unknown form or a block without elements.
    """
    check_form(form)
    if block < 1:
        raise PlanError("a block needs at least one element", got=block)
    n = x.shape[-1]
    count = math.ceil(n / block)
    if n % block:
        x = torch.nn.functional.pad(x, (0, count * block - n))
    blocks = x.unflatten(-1, (count, block))
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    largest = torch.linalg.vector_norm(blocks, math.inf, dim=-1, dtype=exact)
    scales = (largest / LARGEST[form]).float().clamp_(min=torch.finfo(torch.float32).tiny)
    values = blocks / scales.unsqueeze(-1)
    if form == "int8":
        values = values.round_()
    return values.to(DTYPES[form]).flatten(-2)[..., :n], scales


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, block: int = BLOCK
) -> torch.Tensor:
    """Write the numbers that codes stand for into `out` and return it.

    Args:
        codes, scales: [..., n] and [..., ceil(n / block)], from `quantize` with the same `block`.
        out: [..., n], of any floating-point dtype, each product rounded to it once.
    """
    n = codes.shape[-1]
    full_length = n - n % block
    if n != full_length:
        tail = (codes[..., full_length:], scales[..., -1:], out[..., full_length:])
        dequantize(*tail, block=n - full_length)
        if not full_length:
            return out
        codes, scales = codes[..., :full_length], scales[..., :-1]
    target = out[..., :full_length].unflatten(-1, (-1, block))
    target.copy_(codes.unflatten(-1, (-1, block)))  # exact: every code is a bfloat16 and a float16
    target.mul_(scales.unsqueeze(-1))
    return out
