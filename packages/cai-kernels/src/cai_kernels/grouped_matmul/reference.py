"""Grouped matmul in plain torch: a loop over experts."""

from __future__ import annotations

import itertools

import torch
from torch._guards import detect_fake_mode


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [T, D], weight [E, D, F], offsets [E + 1] -> [T, F]; rows outside every group are zeros.

    The host waits for the offsets. Under `torch.compile` it masks instead: E matmuls over all rows. Offsets without
    values, as those of a plan, stand for experts with equal numbers of rows.
    """
    rows = x.shape[0]
    if torch.compiler.is_compiling():
        at = torch.arange(rows, device=x.device)[:, None]
        out = x.new_zeros(rows, weight.shape[2])
        for e in range(weight.shape[0]):
            mine = (at >= offsets[e]) & (at < offsets[e + 1])
            out = torch.where(mine, x @ weight[e], out)
        return out
    if detect_fake_mode(offsets) is None and not offsets.is_meta:
        bounds = offsets.tolist()
    else:
        bounds = [rows * expert // weight.shape[0] for expert in range(weight.shape[0] + 1)]
    pieces = [x[first:end] @ weight[e] for e, (first, end) in enumerate(itertools.pairwise(bounds))]
    before = x.new_zeros(bounds[0], weight.shape[2])
    after = x.new_zeros(rows - bounds[-1], weight.shape[2])
    return torch.cat([before, *pieces, after])
