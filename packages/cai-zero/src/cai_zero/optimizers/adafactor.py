"""Adafactor: Adam's second moment kept as row and column means of every matrix.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", arXiv:1804.04235; the formula is
that of `torch.optim.Adafactor`.
"""

from __future__ import annotations

from typing import Any

import torch

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_zero.optimizers import factored
from cai_zero.optimizers.base import Entry, Params, PartOptimizer, maths_dtype
from cai_zero.optimizers.moments import by_group
from cai_zero.optimizers.options import check_options
from cai_zero.optimizers.pieces import Part
from cai_zero.optimizers.sums import square_sums, summed, sums_dtype


class Adafactor(PartOptimizer):
    """Adafactor over unsharded, sharded or tensor-parallel parameters.

    A parameter of two or more dimensions keeps a mean square for every row and column of its last two (of the
    global tensor, the same on all ranks), any other a mean square an element. The update, gradient over the root of
    the estimate, is clipped to RMS `d` and scaled by `max(eps[1], RMS(weight)) * min(lr, 1 / sqrt(step))`.

    Args:
        lr: bound of the relative step; without `relative_step`, the step itself.
        beta2_decay: the mean squares move by `step ** beta2_decay`.
        eps: (floor of the estimate's root; None: the machine epsilon of the parameter's dtype, floor of the scale).
        d: largest RMS of an update.
        weight_decay: decoupled, times `lr`.
        relative_step: whether steps become smaller, as `1 / sqrt(step)` does once it is below `lr`.
        mesh: see `PartOptimizer`.

    State is float32 (float64 for float64 parameters). Two sums over the ranks a step.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        relative_step: bool = True,
        mesh: AnyMesh | None = None,
    ):
        check_options("Adafactor", lr=lr, eps=eps, d=d, weight_decay=weight_decay, beta2_decay=-beta2_decay)
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"relative_step": relative_step}, mesh)

    def slots(self, part: Part, group: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        if not factored.is_factored(part.shape):
            return {"variance": None}
        return {"row_var": factored.row_shape(part.shape), "col_var": factored.column_shape(part.shape)}

    def update(self, entries: list[Entry]) -> None:
        weights = self._advance(entries)
        updates = {e: _divided(e) for e in entries if e.grad is not None}
        rms = update_rms(entries, updates, self.mesh)
        for group, live in by_group(entries):
            live_updates = [updates[e] for e in live]
            for e, update in zip(live, live_updates, strict=True):
                size = (weights[e] / max(e.part.numel, 1)).sqrt_().clamp_(min=group["eps"][1])
                update.mul_(size * step_size(e) / (rms[e] / group["d"]).clamp_(min=1.0))
            live_weights = [e.weight for e in live]
            if group["weight_decay"]:
                torch._foreach_mul_(live_weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(live_weights, live_updates)

    def _advance(self, entries: list[Entry]) -> dict[Entry, torch.Tensor]:
        """Move the mean squares; returns the sum of squares of every weight."""
        dtype = sums_dtype([e.weight for e in entries])
        weights = square_sums([e.weight for e in entries], dtype).split(1)
        local = [torch.cat([w, local_sums(e, e.grad, dtype)]) for e, w in zip(entries, weights, strict=True)]
        totals = summed(local, [e.axes for e in entries], self.mesh)
        for entry, total in zip(entries, totals, strict=True):
            if entry.grad is None:
                continue
            weight, shape = entry.step ** entry.group["beta2_decay"], entry.part.shape
            if factored.is_factored(shape):
                sums = total[1:].to(maths_dtype(entry.weight))
                factored.advance(entry["row_var"], entry["col_var"], sums, shape, weight, 0.0)
            else:
                entry["variance"].lerp_(entry.grad.square(), weight)
        return {entry: total[0] for entry, total in zip(entries, totals, strict=True)}


def step_size(entry: Entry) -> float:
    """Return the step of a parameter as a part of its size."""
    group = entry.group
    return min(group["lr"], entry.step**-0.5) if group["relative_step"] else group["lr"]


def local_sums(entry: Entry, values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """This rank's sums of squares of rows and columns of `values` [1-d, 0 long if not factored]; zeros for None."""
    shape = entry.part.shape
    if not factored.is_factored(shape):
        return torch.zeros(0, dtype=dtype, device=entry.weight.device)
    out = torch.zeros(factored.factored_numel(shape), dtype=dtype, device=entry.weight.device)
    return out if values is None else factored.square_sums_of(entry.boxes(values), shape, out)


def update_rms(
    entries: list[Entry], updates: dict[Entry, torch.Tensor], mesh: ParallelMesh | None
) -> dict[Entry, torch.Tensor]:
    """Root mean square of the update of every global parameter, a scalar tensor each."""
    empty = torch.zeros(0, dtype=sums_dtype([e.weight for e in entries]), device=entries[0].weight.device)
    local = square_sums(
        [updates.get(e, empty) for e in entries], sums_dtype([e.weight for e in entries])
    ).split(1)
    totals = torch.cat(summed(local, [e.axes for e in entries], mesh))
    numel = [max(e.part.numel, 1) for e in entries]
    rms = torch._foreach_sqrt(torch._foreach_div(list(totals.unbind()), [float(n) for n in numel]))
    return dict(zip(entries, rms, strict=True))


def _divided(entry: Entry) -> torch.Tensor:
    """The gradient over the root of the estimated mean square, a new tensor."""
    floor = entry.group["eps"][0]
    floor = torch.finfo(entry.weight.dtype).eps if floor is None else floor
    grad = entry.gradient
    if not factored.is_factored(entry.part.shape):
        return entry["variance"].clamp(min=floor * floor).rsqrt_().mul_(grad)
    update = torch.empty_like(grad)
    for (box, out), (_, values) in zip(entry.boxes(update), entry.boxes(grad), strict=True):
        root = factored.estimate(entry["row_var"], entry["col_var"], box, floor)
        torch.mul(root.clamp_(min=floor * floor).rsqrt_(), values, out=out)
    return update
