"""Norms, sums and extremes of gradients of which each rank has a part: what the operators of those names become."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cai_mesh.gradients.gradient_views.place import PlacedGradient


def _power(part: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the summand of a norm: the sum of powers, or the largest."""
    part = part.to(dtype)
    if order == math.inf:
        return part.abs().max() if part.numel() else part.new_zeros(())
    if order == 0:
        return (part != 0).sum().to(dtype)
    return part.abs().pow(order).sum() if order != 2 else part.square().sum()


def _norms(grads: Sequence[PlacedGradient], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """One norm of each, with one message for all that lie over the same ranks."""
    order = float(order)
    if all(grad.place.alone for grad in grads):
        return [torch.linalg.vector_norm(grad.part, order, dtype=dtype) for grad in grads]
    if order == -math.inf or order < 0:
        return [torch.linalg.vector_norm(g.whole(), order, dtype=dtype) for g in grads]
    norm_of: dict[int, torch.Tensor] = {}
    kinds: dict[Any, list[int]] = {}
    for i, grad in enumerate(grads):
        kinds.setdefault((grad.place.sums, grad.place.beyond, grad.device, dtype or grad.dtype), []).append(i)
    for (_, _, _, kind), members in kinds.items():
        wide = torch.float64 if kind == torch.float64 else torch.float32
        powers = torch.stack([_power(grads[i].part, order, wide) for i in members])
        total = grads[members[0]].place.combine(powers, "max" if order == math.inf else "sum")
        norms = total if order in (0, 1, math.inf) else total.sqrt() if order == 2 else total.pow(1 / order)
        norm_of.update(zip(members, norms.to(kind).unbind(), strict=True))
    return [norm_of[i] for i in range(len(grads))]


def _foreach_norm(grads: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    placed_grads = [g for g in grads if hasattr(g, "place")]
    norms = iter(_norms(placed_grads, ord, dtype))
    return [
        next(norms) if hasattr(g, "place") else torch.linalg.vector_norm(g, ord, dtype=dtype) for g in grads
    ]


def _vector_norm(
    grad: PlacedGradient,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    every = dim is None or len(dim) == grad.dim() or (grad.place.local and grad.dim() == 1)
    if not every or keepdim:
        return torch.linalg.vector_norm(grad.whole(), ord, dim, keepdim, dtype=dtype)
    return _norms([grad], ord, dtype)[0]


def _norm(grad: PlacedGradient, p: float | None = 2, *rest: Any, **options: Any) -> torch.Tensor:
    if rest or options:
        return torch.norm(grad.whole(), p, *rest, **options)
    return _norms([grad], 2 if p is None else p, None)[0]


def _sum(grad: PlacedGradient, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return grad.place.combine(grad.part.sum(dtype=dtype))


def _mean(grad: PlacedGradient, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    count = grad.place.combine(
        torch.tensor(float(grad.part.numel()), dtype=torch.float64, device=grad.device)
    )
    return grad.place.combine(grad.part.sum(dtype=dtype)) / count.to(dtype or grad.dtype)


def _extreme(name: str) -> Callable[..., torch.Tensor]:
    def extreme(grad: PlacedGradient, *rest: Any, **options: Any) -> Any:
        if rest or options:
            return getattr(torch, name)(grad.whole(), *rest, **options)
        largest = name in ("max", "amax")
        part = grad.part
        if not part.numel():
            limit = -math.inf if largest else math.inf
            part = torch.full((1,), limit, dtype=part.dtype, device=part.device)
        return grad.place.combine(
            getattr(part, "max" if largest else "min")().clone(), "max" if largest else "min"
        )

    return extreme


def _any(grad: PlacedGradient, *rest: Any, **options: Any) -> torch.Tensor:
    if rest or options:
        return torch.any(grad.whole(), *rest, **options)
    return grad.place.combine(grad.part.any().to(torch.uint8), "max").bool()


def _all(grad: PlacedGradient, *rest: Any, **options: Any) -> torch.Tensor:
    if rest or options:
        return torch.all(grad.whole(), *rest, **options)
    return ~grad.place.combine((~grad.part.all()).to(torch.uint8), "max").bool()


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": _foreach_norm,
    "linalg_vector_norm": _vector_norm,
    "norm": _norm,
    "sum": lambda grad, *rest, **options: (
        _sum(grad, **options) if not rest else torch.sum(grad.whole(), *rest, **options)
    ),
    "mean": lambda grad, *rest, **options: (
        _mean(grad, **options) if not rest else torch.mean(grad.whole(), *rest, **options)
    ),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "amax": _extreme("amax"),
    "amin": _extreme("amin"),
    "any": _any,
    "all": _all,
}
