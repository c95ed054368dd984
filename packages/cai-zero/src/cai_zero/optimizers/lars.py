"""LARS: momentum SGD whose rate for every parameter follows the ratio of its norm to its gradient's.

You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888.
"""

from __future__ import annotations

from typing import Any

import torch

from cai_mesh.comm import AnyMesh
from cai_zero.optimizers.base import Entry, Params, PartOptimizer
from cai_zero.optimizers.moments import by_group
from cai_zero.optimizers.options import check_options
from cai_zero.optimizers.pieces import Part
from cai_zero.optimizers.trust import global_norms


class Lars(PartOptimizer):
    """LARS over unsharded, sharded or tensor-parallel parameters.

    For weight w and gradient g, `v = momentum * v + lr * ratio * (g + weight_decay * w)` and `w = w - v`, where
    `ratio = trust * |w| / (|g| + weight_decay * |w|)` and the norms are those of the global parameter.

    Args:
        params: parameters or param groups. A group may say `adapt=False`: ratio 1 (usual for biases and norms).
        lr, momentum, weight_decay: as in the paper.
        trust: its trust coefficient, by how much a layer is trusted to change in one step.
        mesh: see `PartOptimizer`.

    The ratio is 1 where |w| or its denominator is 0. State: one element an element, float32 (float64 for float64
    parameters). One sum over the ranks a step.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        *,
        mesh: AnyMesh | None = None,
    ):
        check_options("Lars", lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt": True,
        }
        super().__init__(params, defaults, mesh)

    def slots(self, part: Part, group: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        return {"momentum_buffer": None}

    def update(self, entries: list[Entry]) -> None:
        weight, grad = global_norms(
            entries, {e: e.gradient for e in entries if e.grad is not None}, self.mesh
        )
        index = {entry: i for i, entry in enumerate(entries)}
        for group, live in by_group(entries):
            live_updates = list(torch._foreach_add([e.gradient for e in live], 0))
            if group["weight_decay"]:
                torch._foreach_add_(live_updates, [e.weight for e in live], alpha=group["weight_decay"])
            if group["adapt"]:
                denominator = grad + group["weight_decay"] * weight
                ratio = torch.where(
                    (weight > 0) & (denominator > 0), group["trust"] * weight / denominator, 1.0
                ).unbind()
                torch._foreach_mul_(live_updates, [ratio[index[e]] for e in live])
            buffers = [e["momentum_buffer"] for e in live]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, live_updates, alpha=group["lr"])
            torch._foreach_sub_([e.weight for e in live], buffers)
