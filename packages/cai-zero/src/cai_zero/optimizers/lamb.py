"""LAMB: Adam whose step of every parameter is scaled by the parameter's norm.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962.
"""

from __future__ import annotations

from typing import Any

import torch

from cai_mesh.comm import AnyMesh
from cai_zero.optimizers.base import Entry, Params, PartOptimizer
from cai_zero.optimizers.moments import adam_updates, by_group
from cai_zero.optimizers.options import check_options
from cai_zero.optimizers.pieces import Part
from cai_zero.optimizers.trust import trust_ratios


class Lamb(PartOptimizer):
    """LAMB over unsharded, sharded or tensor-parallel parameters.

    With m and v the moments of Adam, every parameter x moves by `lr * |x| / |u| * u`, where
    `u = m̂ / (sqrt(v̂) + eps) + weight_decay * x` and the norms are those of the global parameter.

    Args:
        params: parameters or param groups. A group may say `adapt=False`: no ratio (usual for biases and norms).
        lr, betas, eps, weight_decay: as in the paper.
        max_trust: largest ratio; None for no bound.
        mesh: see `PartOptimizer`.

    A ratio is 1 where one of the norms is 0. State: two moments an element, float32 (float64 for float64
    parameters). One sum over the ranks a step.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_trust: float | None = None,
        mesh: AnyMesh | None = None,
    ):
        check_options("Lamb", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_trust=max_trust)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "max_trust": max_trust, "adapt": True}, mesh)

    def slots(self, part: Part, group: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        return {"exp_avg": None, "exp_avg_sq": None}

    def update(self, entries: list[Entry]) -> None:
        updates: dict[Entry, torch.Tensor] = {}
        for group, live in by_group(entries):
            live_updates = adam_updates(live, group["betas"], group["eps"])
            if group["weight_decay"]:
                torch._foreach_add_(live_updates, [e.weight for e in live], alpha=group["weight_decay"])
            updates.update(zip(live, live_updates, strict=True))
        ratios = trust_ratios(entries, updates, self.mesh)
        for group, live in by_group(entries):
            live_updates = [updates[e] for e in live]
            if group["adapt"]:
                scales = [ratios[e] for e in live]
                if group["max_trust"] is not None:
                    torch._foreach_clamp_max_(scales, group["max_trust"])
                torch._foreach_mul_(live_updates, scales)
            torch._foreach_add_([e.weight for e in live], live_updates, alpha=-group["lr"])
