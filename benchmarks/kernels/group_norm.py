"""Cases of group_norm with SiLU: images of diffusion UNets, channels last and first.

The floor: forward reads x and writes y, 4 bytes a value of bfloat16; a group that no program holds is read twice, and
of that the second time from the L2 cache if a batch fits (50 MB), else 6 bytes. Backward reads dy and x and writes dx,
6 bytes a value, or 10. At 3.35 TB/s (H100) the first shape's 42 MB an image tensor takes 25 us forward and 38 us
backward at least. Below some 2 MB a call is bound by its launches: one for a group that a program holds, else three.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import group_norm

GROUPS = 32


def make(samples: int, channels: int, side: int, last: bool):
    def inputs(device: torch.device) -> tuple:
        x = torch.randn(samples, channels, side, side, device=device, dtype=torch.bfloat16)
        x = x.to(memory_format=torch.channels_last) if last else x
        weight, bias = (
            torch.randn(channels, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        return x.requires_grad_(), weight, bias

    return inputs


def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return group_norm(x, GROUPS, weight, bias, silu=True)


def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, GROUPS, weight, bias))


def cases(tiny: bool) -> Iterator[Case]:
    sizes = (
        [(1, 64, 4)] if tiny else [(16, 320, 64), (16, 640, 32), (16, 1280, 16), (16, 2560, 8), (2, 320, 64)]
    )
    for samples, channels, side in sizes:
        for last in (True, False):
            tensor = samples * channels * side * side * 2
            shape = f"{samples}x{channels}x{side}x{side} channels {'last' if last else 'first'}"
            inputs = make(samples, channels, side, last)
            yield Case("group_norm silu", shape, inputs, ours, eager, None, 2 * tensor, 3 * tensor)
