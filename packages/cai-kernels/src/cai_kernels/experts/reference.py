"""A layer of experts in parts, each differentiable by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from cai_kernels.backend import Backend
from cai_kernels.embedding import embedding
from cai_kernels.gated import reference as gated
from cai_kernels.grouped_matmul import grouped_matmul
from cai_kernels.token_permute import token_permute, token_unpermute


@dataclass(frozen=True)
class ExpertGate:
    """The product of the two halves that an expert's first matrix makes.

    Args:
        kind: the function of the gate half, as in `swiglu` and `geglu`; "clamped" is gpt-oss's: with the gate at most
            `limit` and the other half, up, within it, `gate * sigmoid(alpha * gate) * (up + 1)`.
        interleaved: whether the halves are the even and the odd columns, and not the first and the last ones.
        alpha, limit: numbers of the kind "clamped".
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "clamped"] = "silu"
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the product [N, I] of the halves of `hidden` [N, 2 I], in plain torch."""
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if self.interleaved else hidden.chunk(2, -1)
        if self.kind != "clamped":
            return gated.gated(gate, up, self.kind)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


@dataclass(frozen=True, eq=False)
class AdaptedExperts:
    """Matrices of experts with low-rank ones beside them, a pair an expert (Hu et al., arXiv:2106.09685).

    Args:
        weight: [E, in, out], any strides.
        first: [E, r, in], which rows are multiplied by first.
        second: [E, out, r].
        scale: the factor of what the pair adds.
    """

    weight: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    scale: float = 1.0

    def product(self, rows: torch.Tensor, offsets: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Return the product of rows [N, in], in the order of their experts, with both: [N, out]."""
        narrow = grouped_matmul(rows, self.first.transpose(1, 2), offsets, backend=backend) * self.scale
        added = grouped_matmul(narrow, self.second.transpose(1, 2), offsets, backend=backend)
        return grouped_matmul(rows, self.weight, offsets, backend=backend) + added


Matrices = torch.Tensor | AdaptedExperts
"""One matrix of each expert [E, in, out], with adapters beside it or alone."""


def weight_of(matrices: Matrices) -> torch.Tensor:
    """Return the matrices [E, in, out] without adapters."""
    return matrices.weight if isinstance(matrices, AdaptedExperts) else matrices


def _product(rows: torch.Tensor, matrices: Matrices, offsets: torch.Tensor, backend: Backend) -> torch.Tensor:
    if isinstance(matrices, AdaptedExperts):
        return matrices.product(rows, offsets, backend)
    return grouped_matmul(rows, matrices, offsets, backend=backend)


def experts_of_rows(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the expert of each row, int32 [rows]; offsets [E + 1]. Rows of no expert count to the last one."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(offsets[1:], row, right=True, out_int32=True)
    return expert.clamp(max=offsets.shape[0] - 2)


def weights_of_rows(weights: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the weight of each row [rows], in float32 or wider; weights, index [T, K]. Zeros where one is dropped."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    place = torch.where(index >= 0, index, rows).flatten().long()
    by_row = torch.zeros(rows + 1, dtype=wide, device=weights.device)
    return by_row.scatter(0, place, weights.flatten().to(wide))[:rows]


def expert_layer(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    gate: Callable[[torch.Tensor], torch.Tensor],
    up_bias: torch.Tensor | None,
    rows: int,
    backend: Backend,
) -> torch.Tensor:
    """Compute a layer of experts but for the bias of its second product; arguments as in `cai_kernels.expert_layer`."""
    permuted, offsets, index = token_permute(tokens, ids, weight_of(up).shape[0], rows=rows, backend=backend)
    hidden = _product(permuted, up, offsets, backend)
    if up_bias is not None:
        hidden = hidden + embedding(experts_of_rows(offsets, rows), up_bias, backend=backend)
    by_row = weights_of_rows(weights, index, rows)[:, None]
    gated_rows = gate(hidden)
    gated_rows = (gated_rows.to(torch.promote_types(gated_rows.dtype, by_row.dtype)) * by_row).to(
        tokens.dtype
    )
    return token_unpermute(_product(gated_rows, down, offsets, backend), index, backend=backend)
