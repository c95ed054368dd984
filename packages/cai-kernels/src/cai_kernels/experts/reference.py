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
class ExpertAdapters:
    """Low-rank matrices beside one of the two products of a layer, a pair an expert (arXiv:2106.09685).

    Args:
        first: [E, r, in], which rows are multiplied by first.
        second: [E, out, r].
        scale: the factor of what they add.
    """

    first: torch.Tensor
    second: torch.Tensor
    scale: float = 1.0

    def added(self, rows: torch.Tensor, offsets: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Return what they add to the product of rows [N, in] in the order of their experts: [N, out]."""
        narrow = grouped_matmul(rows, self.first.transpose(1, 2), offsets, backend=backend)
        return grouped_matmul(narrow * self.scale, self.second.transpose(1, 2), offsets, backend=backend)


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
    up: torch.Tensor,
    down: torch.Tensor,
    gate: Callable[[torch.Tensor], torch.Tensor],
    up_bias: torch.Tensor | None,
    rows: int,
    backend: Backend,
    up_adapters: ExpertAdapters | None = None,
    down_adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Compute a layer of experts but for the bias of its second product; arguments as in `cai_kernels.expert_layer`."""
    permuted, offsets, index = token_permute(tokens, ids, up.shape[0], rows=rows, backend=backend)
    hidden = grouped_matmul(permuted, up, offsets, backend=backend)
    if up_adapters is not None:
        hidden = hidden + up_adapters.added(permuted, offsets, backend)
    if up_bias is not None:
        hidden = hidden + embedding(experts_of_rows(offsets, rows), up_bias, backend=backend)
    by_row = weights_of_rows(weights, index, rows)[:, None]
    gated_rows = gate(hidden)
    gated_rows = (gated_rows.to(torch.promote_types(gated_rows.dtype, by_row.dtype)) * by_row).to(
        tokens.dtype
    )
    output = grouped_matmul(gated_rows, down, offsets, backend=backend)
    if down_adapters is not None:
        output = output + down_adapters.added(gated_rows, offsets, backend)
    return token_unpermute(output, index, backend=backend)
