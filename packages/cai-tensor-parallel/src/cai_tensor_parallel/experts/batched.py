"""Layers of experts that compute all experts for all tokens, in batches: rows of one expert, then rows of the next.

Such a layer is called with [E * T, D], and the weights of a token have scaled its rows already: a row of an expert that
it does not visit is zero, and stays so. Rows that are not zero travel as tokens with one expert each, so that a rank
computes what is visited alone. Llama 4 is built so.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from typing import Any

import torch
from torch import Tensor, nn

from cai_tensor_parallel.experts.finding import ExpertsRole, experts_of
from cai_tensor_parallel.experts.layer import Spread
from cai_tensor_parallel.experts.routes import choices_of, has_values


def visited_rows(rows: Tensor, experts: int, visits: int) -> Tensor:
    """Return the places of rows that are not zero, int64 [V], in order; of a token that is all zero, all of its rows.

    The host waits for their number.

    Args:
        rows: rows of all experts, [experts * T, D].
        visits: the experts that a token visits, by which rows without values are counted.
    """
    if not has_values(rows):
        return torch.arange(len(rows) // experts * visits, device=rows.device)
    visited = (rows.detach() != 0).any(-1).view(experts, -1)
    return (visited | ~visited.any(0)).flatten().nonzero().flatten()


def batched_forward(
    role: ExpertsRole,
    layer: nn.Module,
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    visits: int | None = None,
) -> Tensor:
    """Compute by the forward of such a layer's class, an expert at a time: a form of `ExpertMaths` for each role."""
    row, choice = choices_of(ids, visits)
    chosen = ids[row, choice]
    order = torch.argsort(chosen, stable=True)
    by_expert = tokens[row[order]].split(_sizes(chosen, experts_of(layer, role)))
    outputs = [
        type(layer).forward(one, rows)
        for one, rows in zip(_one_each(layer, role), by_expert, strict=True)
        if len(rows)
    ]
    weighted = torch.cat(outputs) * weights[row, choice][order, None]
    return weighted.new_zeros(tokens.shape).index_add(0, row[order], weighted)


def spread_batched(layer: nn.Module, role: ExpertsRole, over: Spread, visits: int) -> None:
    """Let such a layer, whose parameters are this rank's part, compute with the experts of all ranks, in place."""
    part = over.parts[over.group.rank()]
    setattr(layer, role.count, part.last - part.first)
    experts, maths = over.parts[-1].last, functools.partial(batched_forward, role)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, -2)
        places = visited_rows(rows, experts, visits)
        ids = (places // (len(rows) // experts))[:, None]
        chosen = rows[places]
        output = over.compute(self, maths, chosen, ids, torch.ones_like(ids, dtype=rows.dtype))
        return torch.zeros_like(rows).index_copy(0, places, output).view(hidden_states.shape)

    layer.forward = types.MethodType(forward, layer)


def _sizes(chosen: Tensor, experts: int) -> list[int]:
    if has_values(chosen):
        return torch.bincount(chosen, minlength=experts).tolist()
    bounds = [len(chosen) * expert // experts for expert in range(experts + 1)]
    return [last - first for first, last in itertools.pairwise(bounds)]


def _one_each(layer: nn.Module, role: ExpertsRole) -> list[nn.Module]:
    """Return layers of one expert each, whose parameters are views of the layer's."""
    pieces = {name: param.split(1) for name, param in layer._parameters.items() if param is not None}
    layers = [copy.copy(layer) for _ in next(iter(pieces.values()))]
    for expert, one in enumerate(layers):
        one.__dict__["_parameters"] = {name: of[expert] for name, of in pieces.items()}
        setattr(one, role.count, 1)
    return layers
