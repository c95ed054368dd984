"""Quantized weights and their products in plain torch.

Dettmers et al., QLoRA, arXiv:2305.14314, for nf4; bits are those of bitsandbytes' `quantize_4bit` with blocks of 64.
"""

from __future__ import annotations

import functools

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from cai_kernels.quantized_linear.kinds import BLOCK, features_of, shapes_of

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The levels of nf4 (QLoRA, appendix E): even quantiles of the normal distribution, zero among them, up to one."""

SMALLEST = 1e-38  # of what is divided by: reciprocals stay finite
AT_ONCE = (
    1 << 24
)  # numbers of a weight that are quantized at a time, lest their copies in float32 fill the memory


@functools.cache
def levels(device: torch.device) -> torch.Tensor:
    """Return the levels of nf4 on a device, float32 [16]; one tensor, so that calls copy nothing from the host."""
    with unset_fake_temporarily():  # later calls want values
        return torch.tensor(LEVELS, dtype=torch.float32, device=device)


def quantize(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] -> its codes and scales; the scale of numbers that are not all finite is not finite."""
    outputs, inputs = weight.shape
    shapes = shapes_of(inputs, outputs, kind)
    codes = torch.empty(shapes.codes, dtype=shapes.dtype, device=weight.device)
    scales = torch.empty(shapes.scales, dtype=torch.float32, device=weight.device)
    step = max(AT_ONCE // inputs, 1)
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        numbers = weight[part].float().contiguous()
        (_to_nf4 if kind == "nf4" else _to_int8)(numbers, codes[part], scales[part])
    return codes, scales


def _to_nf4(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes and scales of weight [rows, in], float32.

    A code is that of the nearest level, the lower of two that are equally near. Numbers are multiplied by the
    reciprocal of the scale, as bitsandbytes does: a division rounds some of them to the other side of a midpoint.
    """
    blocks = weight.reshape(*scales.shape, BLOCK)
    torch.amax(blocks.abs(), -1, out=scales)
    table = levels(weight.device)
    midpoints = (table[:-1] + table[1:]) / 2
    fractions = blocks * (1.0 / scales.clamp(min=SMALLEST))[..., None]
    nearest = torch.bucketize(fractions, midpoints, out_int32=True).view(*codes.shape, 2).to(torch.uint8)
    torch.bitwise_or(nearest[..., 0] << 4, nearest[..., 1], out=codes)


def _to_int8(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes and scales of weight [rows, in], float32; halves round to even."""
    largest = weight.abs().amax(1, keepdim=True)
    torch.div(
        largest, torch.full_like(largest, 127.0), out=scales
    )  # a GPU multiplies by a number's reciprocal
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes.copy_((weight / divisors).round_().clamp_(-127, 127))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """codes, scales -> the weight [out, in], multiplied in float32 and rounded once."""
    if kind == "int8":
        return (codes.float() * scales).to(dtype)
    inputs, outputs = features_of(codes, kind)
    pairs = torch.stack((codes >> 4, codes & 15), -1)
    numbers = levels(codes.device)[pairs.int()].view(*scales.shape, BLOCK)
    return (numbers * scales[..., None]).view(outputs, inputs).to(dtype)


def quantized_linear(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
) -> torch.Tensor:
    """rows [..., in] -> [..., out]; bias of the dtype of rows."""
    return F.linear(rows, dequantize(codes, scales, kind, rows.dtype), bias)


def input_gradient(
    upstream: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str
) -> torch.Tensor:
    """upstream [..., out] -> the gradient of the input [..., in]."""
    return upstream @ dequantize(codes, scales, kind, upstream.dtype)
