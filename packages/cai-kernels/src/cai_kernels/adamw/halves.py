"""A float32 weight as a bfloat16 one, which a model computes with, and the 16 bits that it lacks.

The pair has the bits of the float32 number, no more and no less: beside parameters in bfloat16, master weights take two
bytes an element and not four. A bfloat16 number is the upper half of a float32 one. The lower half counts as signed, so
the upper one is rounded to the nearest and not cut off.
"""

from __future__ import annotations

import torch

NAN = 0x7FC0
"""Bits of a bfloat16 that is no number."""


def split(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bfloat16, int16) of a float32 tensor. Halfway between two bfloat16 numbers, the one farther from zero."""
    bits = full.view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    number = ~full.isnan()  # those that are none may not be rounded: some would become zero
    high, low = torch.where(number, high, NAN), torch.where(number, low, 0)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The float32 tensor that `split` was given; NaN for NaN.

    A zero with a negative `low`, which `split` never gives, is a zero.
    """
    lower = torch.where(high == 0, low.clamp(min=0), low)
    return ((high.view(torch.int16).to(torch.int32) << 16) + lower).view(torch.float32)
