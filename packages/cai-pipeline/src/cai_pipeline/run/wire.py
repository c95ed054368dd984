"""The tensors that stages send each other, in a byte an element.

A row (the last dim: the hidden state of a token, or its gradient) is sent as float8 e4m3 codes and one float32 scale,
the largest absolute value over 448 (Micikevicius et al., https://arxiv.org/abs/2209.05433). A value is off by a
sixteenth of itself at most, and by 1/1024 of the scale where that is more. A row that is not finite comes out as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from cai_mesh.errors import PlanError

Wire = Literal["full", "fp8"]
CODES = torch.float8_e4m3fn
LARGEST = 448.0
SCALE_BYTES = 4


def check_wire(wire: str) -> None:
    """Raise PlanError for a form that there is not."""
    if wire not in get_args(Wire):
        raise PlanError(
            "unknown form of what stages send", got=repr(wire), expected=" or ".join(get_args(Wire))
        )


def as_hidden(shapes: Sequence[tuple[int, ...]]) -> list[bool]:
    """Whether each tensor of a transfer is as wide as the first, the hidden states: an encoder's output is.

    Others may have rows whose values share no scale, as a position bias has once a mask is in it: they are not packed.
    """
    dims, width = len(shapes[0]) if shapes else 0, shapes[0][-1:] if shapes else ()
    return [(len(shape), shape[-1:]) == (dims, width) for shape in shapes]


def _width(shape: Sequence[int]) -> int:
    """Number of elements of a row."""
    return shape[-1] if shape and 0 not in shape else 1


def packed_bytes(shape: tuple[int, ...]) -> int:
    """Length of what `pack` makes of a tensor of this shape."""
    elements = torch.Size(shape).numel()
    return elements + SCALE_BYTES * (elements // _width(shape))


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor as uint8 [packed_bytes]: the scales of all rows, then their codes."""
    rows = tensor.detach().reshape(-1, _width(tensor.shape))
    rows = rows if rows.dtype == torch.float64 else rows.float()
    largest = rows.abs().amax(1, keepdim=True).float()
    scale = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (rows / scale).to(CODES)
    return torch.cat([part.view(torch.uint8).flatten() for part in (scale, codes)])


def unpack(sent: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that `pack` was given, rounded."""
    width = _width(shape)
    scales = SCALE_BYTES * (torch.Size(shape).numel() // width)
    scale, codes = sent[:scales].view(torch.float32), sent[scales:].view(CODES)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide).view(-1, width) * scale.view(-1, 1)).to(dtype).view(shape)
