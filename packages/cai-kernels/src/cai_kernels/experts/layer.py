"""A layer of experts as one function of autograd, which keeps little for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cai_kernels.experts import triton
from cai_kernels.experts.reference import ExpertGate, experts_of_rows, weights_of_rows
from cai_kernels.grouped_matmul.function import kernels_for
from cai_kernels.token_permute.function import check_sizes
from cai_kernels.token_permute.triton import expert_order, token_collect, token_spread

Gradients = tuple[torch.Tensor | None, ...]


class _ExpertLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        gate: ExpertGate,
        rows: int,
        backend: str,
    ) -> torch.Tensor:
        index, offsets = expert_order(ids, up.shape[0])
        hidden = _product(token_spread(tokens, index, rows), up, offsets, backend)
        by_row = weights_of_rows(weights, index, rows)
        expert = None if up_bias is None else experts_of_rows(offsets, rows)
        options = (gate.kind, gate.interleaved, gate.alpha, gate.limit)
        gated_rows = triton.expert_gate(hidden, by_row, up_bias, expert, *options)
        ctx.save_for_backward(tokens, up, down, up_bias, index, offsets, by_row, expert, hidden)
        ctx.options, ctx.dtype, ctx.backend = options, weights.dtype, backend
        return token_collect(_product(gated_rows, down, offsets, backend), index, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Gradients:
        tokens, up, down, up_bias, index, offsets, by_row, expert, hidden = ctx.saved_tensors
        need_x, _, need_weights, need_up, need_down, need_bias, *_ = ctx.needs_input_grad
        rows = hidden.shape[0]
        dy = token_spread(dout.contiguous(), index, rows)
        dgated = _product(dy, down.transpose(1, 2), offsets, ctx.backend)
        dhidden, gated_rows, dby_row = triton.expert_gate_backward(
            dgated, hidden, by_row, up_bias, expert, *ctx.options
        )
        ddown = _weight_product(gated_rows, dy, down, offsets, ctx.backend) if need_down else None
        del dgated, gated_rows, dy
        dweights = _by_choice(dby_row, index).to(ctx.dtype) if need_weights else None
        dbias = triton.sums_by_expert(dhidden, offsets) if need_bias else None
        dup = dx = None
        if need_up:
            dup = _weight_product(token_spread(tokens, index, rows), dhidden, up, offsets, ctx.backend)
        if need_x:
            dx = token_collect(_product(dhidden, up.transpose(1, 2), offsets, ctx.backend), index, None)
        return dx, None, dweights, dup, ddown, dbias, None, None, None


def _product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, backend: str) -> torch.Tensor:
    return kernels_for(rows, weight, backend).grouped_matmul(rows, weight, offsets)  # type: ignore[no-any-return]


def _weight_product(
    rows: torch.Tensor, dout: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, backend: str
) -> torch.Tensor:
    return kernels_for(rows, weight, backend).grouped_matmul_weight(rows, dout, weight, offsets)  # type: ignore[no-any-return]


def _by_choice(by_row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The number of each choice's row, [T, K], of [N]; zeros where one is dropped."""
    if not by_row.shape[0]:
        return by_row.new_zeros(index.shape)
    return torch.where(index >= 0, by_row[index.clamp(min=0).long()], 0.0)


def expert_layer(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    gate: ExpertGate,
    rows: int,
    backend: str,
) -> torch.Tensor:
    """Compute a layer of experts in Triton but for the bias of its second product; arguments as in `expert_layer`."""
    check_sizes(ids.shape[1], tokens.shape[1], up.shape[0])
    arguments = (tokens.contiguous(), ids.contiguous(), weights, up, down, up_bias, gate, rows, backend)
    return _ExpertLayer.apply(*arguments)  # type: ignore[no-any-return]
