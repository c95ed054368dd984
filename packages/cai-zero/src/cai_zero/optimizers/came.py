"""CAME: Adafactor with momentum, slowed where the momentum disagrees with the updates it averages.

Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", arXiv:2307.02047.
"""

from __future__ import annotations

from typing import Any

import torch

from cai_mesh.comm import AnyMesh
from cai_zero.optimizers import factored
from cai_zero.optimizers.adafactor import local_sums, update_rms
from cai_zero.optimizers.base import Entry, Params, PartOptimizer, maths_dtype
from cai_zero.optimizers.moments import by_group
from cai_zero.optimizers.options import check_options
from cai_zero.optimizers.pieces import Part
from cai_zero.optimizers.sums import summed, sums_dtype


class Came(PartOptimizer):
    """CAME over unsharded, sharded or tensor-parallel parameters.

    With V the factored mean of `g² + eps[0]`, `u = g / sqrt(V)` is clipped to RMS `clip` and averaged into m. With S
    the factored mean of `(u - m)² + eps[1]`, a matrix moves by `lr * m / sqrt(S)`; a parameter of fewer than two
    dimensions keeps V an element and moves by `lr * m`. More dimensions are matrices of the last two.

    Args:
        lr: the step.
        betas: decay of m, V and S.
        eps: added to g² and to (u - m)².
        clip: largest RMS of u.
        weight_decay: decoupled, times `lr`.
        mesh: see `PartOptimizer`.

    State: m an element, four vectors a matrix (of the global tensor, the same on all ranks), float32 (float64 for
    float64 parameters). Three sums over the ranks a step.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip: float = 1.0,
        weight_decay: float = 0.0,
        *,
        mesh: AnyMesh | None = None,
    ):
        check_options("Came", lr=lr, betas=betas, eps=eps, clip=clip, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "clip": clip, "weight_decay": weight_decay}
        super().__init__(params, defaults, mesh)

    def slots(self, part: Part, group: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        if not factored.is_factored(part.shape):
            return {"exp_avg": None, "exp_avg_sq": None}
        rows, columns = factored.row_shape(part.shape), factored.column_shape(part.shape)
        means = {"exp_avg_sq_row": rows, "exp_avg_sq_col": columns, "res_row": rows, "res_col": columns}
        return {"exp_avg": None, **means}

    def update(self, entries: list[Entry]) -> None:
        self._advance(entries, {e: e.gradient for e in entries if e.grad is not None}, "exp_avg_sq", 1)
        updates = {e: _divided(e, e.gradient, "exp_avg_sq") for e in entries if e.grad is not None}
        rms = update_rms(entries, updates, self.mesh)
        residuals: dict[Entry, torch.Tensor] = {}
        for group, live in by_group(entries):
            for entry in live:
                update = updates[entry].div_((rms[entry] / group["clip"]).clamp_(min=1.0))
                average = entry["exp_avg"].lerp_(update, 1 - group["betas"][0])
                residuals[entry] = update.sub_(average)
        self._advance(entries, residuals, "res", 2)
        for group, live in by_group(entries):
            weights = [e.weight for e in live]
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            steps = [_divided(e, e["exp_avg"], "res") for e in live]
            torch._foreach_add_(weights, steps, alpha=-group["lr"])

    def _advance(
        self, entries: list[Entry], values: dict[Entry, torch.Tensor], slot: str, which: int
    ) -> None:
        """Move the mean squares `slot` (with `betas[which]`, `eps[which - 1]`) by those of `values`."""
        dtype = sums_dtype([e.weight for e in entries])
        local = [local_sums(e, values.get(e), dtype) for e in entries]
        totals = summed(local, [e.axes for e in entries], self.mesh)
        for entry, total in zip(entries, totals, strict=True):
            if entry.grad is None:
                continue
            weight, eps = 1 - entry.group["betas"][which], entry.group["eps"][which - 1]
            if factored.is_factored(entry.part.shape):
                rows, columns = entry[f"{slot}_row"], entry[f"{slot}_col"]
                factored.advance(
                    rows, columns, total.to(maths_dtype(entry.weight)), entry.part.shape, weight, eps
                )
            elif slot == "exp_avg_sq":
                entry[slot].lerp_(values[entry].square().add_(eps), weight)


def _divided(entry: Entry, values: torch.Tensor, slot: str) -> torch.Tensor:
    """`values` over the root of the mean squares `slot`; vectors have no confidence, so theirs stay as they are."""
    if not factored.is_factored(entry.part.shape):
        return values / entry[slot].sqrt() if slot == "exp_avg_sq" else values
    out = torch.empty_like(values)
    for (box, part), (_, source) in zip(entry.boxes(out), entry.boxes(values), strict=True):
        root = factored.estimate(entry[f"{slot}_row"], entry[f"{slot}_col"], box, 0.0)
        torch.mul(root.rsqrt_(), source, out=part)
    return out
