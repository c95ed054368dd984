"""Softmax with scale, mask and biases in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def softmax(
    x: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    biases: Sequence[torch.Tensor],
    causal: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """softmax(scale * x + biases) over the last dim where the mask is true, zeros in a row without any such place."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    for bias in biases:
        wide = wide + bias.to(wide.dtype)
    visible_mask = torch.ones(x.shape[-2:] if x.dim() > 1 else x.shape, dtype=torch.bool, device=x.device)
    if causal:
        visible_mask = visible_mask.tril(x.shape[-1] - x.shape[-2])
    if mask is not None:
        visible_mask = visible_mask & mask
    # The largest value of a row without a place is put at 0, so that nothing becomes nan.
    highest = (
        wide.detach().masked_fill(~visible_mask, -torch.inf).amax(-1, keepdim=True) if x.shape[-1] else wide
    )
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    exponential = (wide - highest).masked_fill(~visible_mask, -torch.inf).exp()
    total = exponential.sum(-1, keepdim=True)
    return (exponential / total.masked_fill(total == 0, 1.0)).to(dtype)
