"""Elementwise arithmetic over lists of segments, in few large operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cai_zero.optimizers.base import Entry


def by_group(entries: Sequence[Entry]) -> list[tuple[dict[str, Any], list[Entry]]]:
    """The entries that have a gradient, by param group; groups without any are left out."""
    groups: dict[int, tuple[dict[str, Any], list[Entry]]] = {}
    for entry in entries:
        if entry.grad is not None:
            groups.setdefault(id(entry.group), (entry.group, []))[1].append(entry)
    return list(groups.values())


def adam_updates(entries: Sequence[Entry], betas: tuple[float, float], eps: float) -> list[torch.Tensor]:
    """Advance `exp_avg` and `exp_avg_sq` and return `m̂ / (sqrt(v̂) + eps)` of every entry, as new tensors.

    Kingma and Ba, "Adam", arXiv:1412.6980.
    """
    first, second = [e["exp_avg"] for e in entries], [e["exp_avg_sq"] for e in entries]
    grads = [e.gradient for e in entries]
    torch._foreach_lerp_(first, grads, 1 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, grads, grads, value=1 - betas[1])
    denominators = list(torch._foreach_sqrt(second))
    torch._foreach_div_(denominators, [(1 - betas[1] ** e.step) ** 0.5 for e in entries])
    torch._foreach_add_(denominators, eps)
    updates = list(torch._foreach_div(first, denominators))
    torch._foreach_div_(updates, [1 - betas[0] ** e.step for e in entries])
    return updates
