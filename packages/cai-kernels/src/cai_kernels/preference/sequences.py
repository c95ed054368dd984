"""Log-probabilities of sequences, from those of tokens, or from hidden states without whole logits."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch

from cai_kernels.backend import Backend, require
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy.log_probs import linear_log_probs
from cai_kernels.preference.checks import FLOATING, truth


class LogProbOptions(TypedDict, total=False):
    """Options of `linear_log_probs`; see there."""

    bias: torch.Tensor | None
    softcap: float | None
    chunk_bytes: int
    backend: Backend


def sequence_log_probs(
    log_probs: torch.Tensor, mask: torch.Tensor | None = None, *, average: bool = False
) -> torch.Tensor:
    """Log-probabilities of sequences: those of their tokens added up, or averaged.

    Args:
        log_probs: [..., T], float32, float64, bfloat16 or float16. What lies outside the mask is not used.
        mask: bool [..., T], the tokens that count; all by default.
        average: divide by the number of tokens that count.

    Returns [...] in float32 (float64 for float64), 0 for a sequence without tokens. Raises `KernelError` naming the
    argument that does not fit.
    """
    require("log_probs", log_probs, dtypes=FLOATING)
    if log_probs.dim() == 0:
        raise KernelError("log_probs has no dim of tokens", got=tuple(log_probs.shape), expected="[..., T]")
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    if mask is not None:
        wide = torch.where(truth("mask", mask, "log_probs", log_probs), wide, 0.0)
    total = wide.sum(-1)
    if not average:
        return total
    return total / (max(log_probs.shape[-1], 1) if mask is None else mask.sum(-1).clamp_min(1))


def linear_sequence_log_probs(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    average: bool = False,
    ignore_index: int = -100,
    **options: Unpack[LogProbOptions],
) -> torch.Tensor:
    """`sequence_log_probs` of `linear_log_probs`: logits are of a chunk of tokens, forward and backward.

    Args:
        x: [..., T, D], float32, bfloat16 or float16 (the reference takes float64 too).
        weight: [V, D] in the dtype of x.
        target: [..., T], int64 or int32; tokens with `ignore_index` (prompt, padding) do not count.
        average: divide by the number of tokens that count.
        options: bias, softcap, chunk_bytes and backend of `linear_log_probs`.

    Returns [...] in float32 (float64 for float64), 0 for a sequence without tokens. Raises `KernelError` naming the
    argument that does not fit.
    """
    if target.dim() == 0:
        raise KernelError("target has no dim of tokens", got=tuple(target.shape), expected="[..., T]")
    log_probs = linear_log_probs(x, weight, target, ignore_index=ignore_index, **options)
    assert isinstance(log_probs, torch.Tensor)
    return sequence_log_probs(log_probs, target != ignore_index, average=average)
