"""A layer of experts of which this rank has a part: its forward sends tokens to where their experts are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_mesh.comm import copy_to, reduce_from
from cai_tensor_parallel.experts.exchange import combine, dispatch, exchange_of, meet
from cai_tensor_parallel.experts.finding import ExpertsRole
from cai_tensor_parallel.experts.routes import Part, choices_of, rows_of, share_of

ExpertMaths = Callable[[nn.Module, Tensor, Tensor, Tensor, int | None], Tensor]
"""What a layer computes with its experts: (layer, tokens [R, D], ids [R, K], weights [R, K], visits) to [R, D].

The sum over a token's choices. Ids count the experts that are held, from 0; -1 stands for one that is not. `visits` is
the number of ids but -1, or None where the host does not know it.
"""


def own_forward(
    layer: nn.Module, tokens: Tensor, ids: Tensor, weights: Tensor, visits: int | None = None
) -> Tensor:
    """Compute by the forward of the layer's class, which is given one choice a row: the plain form of `ExpertMaths`."""
    row, choice = choices_of(ids, visits)
    chosen_ids, chosen_weights = ids[row, choice, None], weights[row, choice, None]
    outputs = type(layer).forward(layer, tokens[row], chosen_ids, chosen_weights).flatten(1)
    width = outputs.shape[-1]
    by_choice = outputs.new_zeros(ids.numel(), width).index_copy(0, row * ids.shape[1] + choice, outputs)
    return by_choice.view(*ids.shape, width).sum(1)


@dataclass(frozen=True)
class Spread:
    """The ranks over which a layer's experts are spread.

    Args:
        group: the ranks among which tokens travel, in the order of `parts`.
        parts: the part of the experts that each has.
        copies: tensor-parallel ranks that are given the same tokens; None: each rank has tokens of its own.
    """

    group: dist.ProcessGroup
    parts: tuple[Part, ...]
    copies: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        _leave_out()

    def compute(
        self, layer: nn.Module, maths: ExpertMaths, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """Compute a whole layer of experts; `hidden` [T, D], `ids` and `weights` [T, K]. Returns [T, D]. Collective."""
        hidden, weights = copy_to(hidden, self.copies), copy_to(weights, self.copies)
        with torch.no_grad():
            rows = rows_of(ids, list(self.parts), self._share(len(hidden)))
            exchange = exchange_of(rows, self.group)
            own_ids = exchange.there(rows.ids)
        own_weights = exchange.there(rows.weights(weights))
        tokens = dispatch(hidden, exchange)
        if len(tokens):
            output = maths(layer, tokens, own_ids, own_weights, exchange.visits)
        else:
            output = nothing(layer, tokens, own_weights)
        output = meet(output.to(hidden.dtype), exchange)
        return reduce_from(combine(output, len(hidden), exchange), self.copies)

    def _share(self, tokens: int) -> tuple[int, int] | None:
        if self.copies is None:
            return None
        return share_of(tokens, self.copies.rank(), self.copies.size())


@functools.cache
def _leave_out() -> None:
    """Leave a layer's computation out of graphs, before the first one: importing torch's compiler takes two seconds."""
    reason = "the host reads how many tokens travel to each rank"
    Spread.compute = torch.compiler.disable(Spread.compute, reason=reason)


def nothing(layer: nn.Module, tokens: Tensor, weights: Tensor) -> Tensor:
    """Return what experts make of no tokens, [0, D]: every parameter has a gradient, of zeros, and backward goes on."""
    empty = tokens + weights.sum()
    for param in layer.parameters():
        if param.requires_grad:
            empty = empty + param.flatten()[:0].sum().to(tokens.dtype)
    return empty


def spread(layer: nn.Module, role: ExpertsRole, over: Spread, maths: ExpertMaths) -> None:
    """Let a layer, whose parameters are this rank's part, compute with the experts of all ranks, in place."""
    part = over.parts[over.group.rank()]
    setattr(layer, role.count, part.last - part.first)

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat = hidden_states.flatten(0, -2)
        output = over.compute(self, maths, flat, top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2))
        return output.view(hidden_states.shape)

    layer.forward = types.MethodType(forward, layer)
