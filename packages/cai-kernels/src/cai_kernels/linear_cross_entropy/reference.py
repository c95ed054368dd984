"""Linear layer and cross-entropy in plain torch, logits and all: what the chunked forms must give."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from cai_kernels.cross_entropy import reference


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, D], weight [V, D], target [rows] -> (loss, z-loss); options of `cross_entropy.reference`."""
    return reference.cross_entropy(F.linear(x, weight, bias), target, **options)


def linear_log_probs(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, D], weight [V, D], target [rows] -> (log-probability of the target, entropy), zeros where ignored."""
    logs = torch.log_softmax(reference.widen(F.linear(x, weight, bias), softcap), -1)
    counted = target != ignore_index
    picked = logs.gather(-1, torch.where(counted, target, 0)[:, None]).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return torch.where(counted, picked, 0.0), torch.where(counted, entropy, 0.0)
