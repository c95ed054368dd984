"""Muon: momentum, orthogonalised over full matrices.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon); the
scale that matches AdamW is that of Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from cai_mesh.comm import AnyMesh
from cai_mesh.errors import PlanError
from cai_zero.optimizers.base import Entry, Params, PartOptimizer
from cai_zero.optimizers.exchange import Exchange, agree_groups
from cai_zero.optimizers.moments import adam_updates, by_group
from cai_zero.optimizers.newton_schulz import NewtonSchulz, work
from cai_zero.optimizers.options import check_options
from cai_zero.optimizers.pieces import Part
from cai_zero.optimizers.sums import Axes, sums_dtype

SCALES = ("original", "match_rms_adamw")
BATCH_ELEMENTS = 1 << 26
"""Matrices of one shape are orthogonalised together until they have this many elements."""


class Muon(PartOptimizer):
    """Muon over unsharded, sharded or tensor-parallel matrices, AdamW over everything else.

    `m = momentum * m + (1 - momentum) * g`, the update is m (with Nesterov the same step again towards m from g),
    orthogonalised as a full global matrix and scaled; weight decay is decoupled.

    The matrices divided over the same axes are shared out among those ranks by work: their pieces travel to the rank
    that orthogonalises each, and pieces of the result back, one all-to-all each way for all of them. Ranks that hold
    copies (`dp_replicate`, all ranks of stage 0) each do the same work.

    Args:
        params: parameters or param groups. Parameters of other than two dimensions, and of groups that say
            `use_muon=False` (embeddings, the output head), are stepped by AdamW with `betas` and `eps`.
        lr, momentum, nesterov, weight_decay: as above; every group may have its own.
        scale: "original" multiplies the rate by sqrt(max(1, rows / columns)), "match_rms_adamw" by
            0.2 * sqrt(max(rows, columns)), with which rate and decay of AdamW fit.
        betas, eps: AdamW's.
        newton_schulz: the iteration that orthogonalises matrices.
        mesh: see `PartOptimizer`. The first step makes process groups over it and is collective over all of it.

    State: momentum an element of a matrix, two moments an element of the rest, float32 (float64 for float64
    parameters).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        *,
        scale: Literal["original", "match_rms_adamw"] = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        newton_schulz: NewtonSchulz | None = None,
        mesh: AnyMesh | None = None,
    ):
        check_options("Muon", lr=lr, momentum=momentum, weight_decay=weight_decay, betas=betas, eps=eps)
        if scale not in SCALES:
            raise PlanError("Muon: unknown scale", got=scale, expected=" or ".join(map(repr, SCALES)))
        self.newton_schulz = newton_schulz or NewtonSchulz()
        self._shared: tuple[object, list[tuple[Exchange, list[int]]]] | None = None
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(
            params, {**defaults, "scale": scale, "betas": betas, "eps": eps, "use_muon": True}, mesh
        )

    def slots(self, part: Part, group: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        if _is_matrix(part, group):
            return {"momentum_buffer": None}
        return {"exp_avg": None, "exp_avg_sq": None}

    def update(self, entries: list[Entry]) -> None:
        matrices = [e for e in entries if _is_matrix(e.part, e.group)]
        rest = [e for e in entries if not _is_matrix(e.part, e.group)]
        if matrices:
            self._step_matrices(matrices)
        for group, live in by_group(rest):
            updates = adam_updates(live, group["betas"], group["eps"])
            _apply(group, live, updates, [group["lr"]] * len(live))

    def _step_matrices(self, entries: list[Entry]) -> None:
        updates: dict[Entry, torch.Tensor] = {}
        for group, live in by_group(entries):
            buffers, grads = [e["momentum_buffer"] for e in live], [e.gradient for e in live]
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            origin = grads if group["nesterov"] else buffers
            live_updates = list(torch._foreach_lerp(origin, buffers, group["momentum"]))
            updates.update(zip(live, live_updates, strict=True))
        self._orthogonalize(entries, updates)
        for group, live in by_group(entries):
            rates = [group["lr"] * _scale(e.part.shape, group["scale"]) for e in live]
            _apply(group, live, [updates[e] for e in live], rates)

    def _orthogonalize(self, entries: list[Entry], updates: dict[Entry, torch.Tensor]) -> None:
        """Orthogonalise the updates as full matrices, in place; zeros for entries without one."""
        dtype = self.newton_schulz.dtype or sums_dtype([e.weight for e in entries])
        device = entries[0].weight.device
        for exchange, members in self._exchanges(entries):
            matrices = [entries[i] for i in members]
            segments = [
                updates[e] if e in updates else torch.zeros_like(e["momentum_buffer"]) for e in matrices
            ]
            pieces = [[view for _, view in e.boxes(s)] for e, s in zip(matrices, segments, strict=True)]
            full = exchange.collect(pieces, dtype, device)
            exchange.give_back(orthogonalized(full, self.newton_schulz), pieces, dtype, device)

    def _exchanges(self, entries: list[Entry]) -> list[tuple[Exchange, list[int]]]:
        """The exchanges of the entries, one a set of axes; planned once. Collective then."""
        plan = self.plan()
        if self._shared is None or self._shared[0] is not plan:
            members: dict[Axes, list[int]] = {}
            for i, entry in enumerate(entries):
                members.setdefault(entry.axes, []).append(i)
            groups = agree_groups(list(members), self.mesh)
            exchanges = []
            for axes, indices in members.items():
                matrices = [entries[i] for i in indices]
                shapes = [e.part.shape for e in matrices]
                boxes = [[box for box, _ in e.boxes(e.weight)] for e in matrices]
                exchanges.append(
                    (Exchange.plan(shapes, [work(s) for s in shapes], boxes, groups[axes]), indices)
                )
            self._shared = (plan, exchanges)
        return self._shared[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "newton_schulz": self.newton_schulz, "_shared": None}


def orthogonalized(full: dict[int, torch.Tensor], how: NewtonSchulz) -> dict[int, torch.Tensor]:
    """Orthogonalise matrices, those of one shape in batches."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, matrix in full.items():
        by_shape.setdefault(matrix.shape, []).append(i)
    orthogonal = {}
    for shape, members in by_shape.items():
        count = max(1, BATCH_ELEMENTS // max(shape.numel(), 1))
        for first in range(0, len(members), count):
            batch = members[first : first + count]
            orthogonal.update(zip(batch, how(torch.stack([full[i] for i in batch])).unbind(), strict=True))
    return orthogonal


def _is_matrix(part: Part, group: dict[str, Any]) -> bool:
    return group["use_muon"] and len(part.shape) == 2


def _scale(shape: tuple[int, ...], scale: str) -> float:
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns)) if scale == "original" else 0.2 * math.sqrt(max(rows, columns))


def _apply(
    group: dict[str, Any], entries: list[Entry], updates: list[torch.Tensor], rates: list[float]
) -> None:
    weights = [e.weight for e in entries]
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_mul_(updates, rates)
    torch._foreach_sub_(weights, updates)
