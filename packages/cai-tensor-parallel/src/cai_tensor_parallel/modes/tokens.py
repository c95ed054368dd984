"""The exchange of a rank's part of the tokens: gathered, and summed and scattered, without a copy of their own.

The tokens of all samples are counted one after the other and dealt out in equal runs. A rank's run has the shape
[samples, sequence/p, ...]: what works token by token never sees that these need not be the tokens of that sample. Parts
of that kind lie one after the other in memory, which cut along the sequence they would not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cai_mesh.comm import Members, gather_from, gathered, scatter_to, start_scatter_sum
from cai_mesh.protocols import TensorHandle
from cai_tensor_parallel.modes.overlap import (
    Scattering,
    gather_matmul,
    matmul_scatter,
    scatter_beside_weight_gradient,
    start_scatter,
)

DIM = 1
"""The dimension of the sequence in a hidden state [samples, sequence, features]."""


def _dealt(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[samples, sequence, ...] as [ranks * samples, sequence/ranks, ...]."""
    return x.reshape(ranks * x.shape[0], x.shape[DIM] // ranks, *x.shape[DIM + 1 :])


def _together(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[ranks * samples, sequence/ranks, ...] as [samples, sequence, ...]."""
    return x.reshape(x.shape[0] // ranks, x.shape[DIM] * ranks, *x.shape[DIM + 1 :])


def own_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part [samples, sequence/p, ...] of a replicated x [samples, sequence, ...]; gathered in backward."""
    return scatter_to(_dealt(x, group.size()), 0, group)


def all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[samples, sequence, ...] of parts, used alike on all ranks: in backward each takes its own part."""
    return _together(gather_from(x, 0, group), group.size())


def gathered_tokens(x: torch.Tensor, ranks: Members) -> torch.Tensor:
    """[samples, sequence, ...] of the parts of all ranks; not differentiable."""
    return _together(gathered(x, 0, ranks), ranks.size)


def start_scatter_tokens(x: torch.Tensor, ranks: Members, *, overlap: bool = False) -> TensorHandle:
    """Start to sum x [samples, sequence, ...] over the ranks for this rank's part of it.

    Args:
        overlap: whether copy engines send it, in eager code; x is [samples, sequence, features].
    """
    if not overlap or torch.compiler.is_compiling():
        return start_scatter_sum(_dealt(x, ranks.size), 0, ranks)
    return Scattering(start_scatter(x.reshape(-1, x.shape[-1]), ranks.group), _own_shape(x, ranks))


def scatter_tokens_beside(
    x: torch.Tensor,
    ranks: Members,
    grad: torch.Tensor,
    token: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    key: str,
) -> torch.Tensor:
    """This rank's part of the sum of x [samples, sequence, features], summed beside a weight's gradient, in a graph."""
    rows = x.reshape(-1, x.shape[-1])
    part = scatter_beside_weight_gradient(rows, token, grad, list(operands), key, ranks.name)
    return part.view(_own_shape(x, ranks))


def _own_shape(x: torch.Tensor, ranks: Members) -> tuple[int, ...]:
    return (x.shape[0], x.shape[DIM] // ranks.size, x.shape[-1])


def matmul_scatter_tokens(x: torch.Tensor, weight: torch.Tensor, ranks: Members) -> torch.Tensor:
    """x [samples, sequence, in/p] times weight [in/p, out], summed: this rank's part [samples, sequence/p, out]."""
    rows = matmul_scatter(x.reshape(-1, x.shape[-1]), weight, ranks.name)
    return rows.view(*_own_shape(x, ranks)[:-1], -1)


def gather_matmul_tokens(
    part: torch.Tensor, weight: torch.Tensor, ranks: Members
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts [samples, sequence/p, in] put together, times weight [in, out]: the product, and what it was made of."""
    samples, length, _ = part.shape
    product, full = gather_matmul(part.reshape(-1, part.shape[-1]), weight, ranks.name)
    shape = (samples, length * ranks.size)
    return product.view(*shape, -1), full.view(*shape, -1)


class _Leading(torch.autograd.Function):
    """`all_tokens` and the product of its result, which has no derivative here."""

    @staticmethod
    def forward(ctx, part, weight, ranks):
        product, full = gather_matmul_tokens(part, weight, ranks)
        ctx.ranks = ranks
        ctx.mark_non_differentiable(product)
        return full, product

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        ranks = ctx.ranks
        return _dealt(grad, ranks.size).chunk(ranks.size)[ranks.rank].contiguous(), None, None


def all_tokens_leading(
    part: torch.Tensor, weight: torch.Tensor, ranks: Members
) -> tuple[torch.Tensor, torch.Tensor]:
    """`all_tokens`, and beside it their product with weight [in, out], [tokens, out], for the layer that makes it."""
    full, product = _Leading.apply(part, weight.detach(), ranks)
    return full, product.flatten(0, 1)
