"""Rows to the ranks of their experts and back.

Both are one exchange in forward and one in backward. A block that is recomputed is so when backward first asks for a
tensor that it keeps, and up to the last one. `meet` stands between the experts and `combine`, keeps a tensor and asks
for it, so that ranks to which no rows come recompute when the others do, and come to the same exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cai_mesh.comm import all_to_all, all_to_all_into
from cai_tensor_parallel.experts.routes import Rows, has_values


@dataclass(frozen=True)
class Exchange:
    """An exchange of rows whose numbers the host knows.

    Args:
        tokens: the token in each row that this rank sends, int64 [S].
        sent, received: the number of rows for, and from, each rank of the group.
        group: the ranks among which experts are spread.
        visits: the number of visits of the rows that come here; None: nobody knows it.
    """

    tokens: Tensor
    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    visits: int | None

    def there(self, rows: Tensor) -> Tensor:
        """Send rows [S, ...] to the ranks of their experts; returns those that came here, [R, ...]."""
        return all_to_all(rows, self.group, out_splits=self.received, in_splits=self.sent)

    def back(self, rows: Tensor) -> Tensor:
        """Send rows [R, ...] to where they came from; returns this rank's own, [S, ...]."""
        return all_to_all(rows, self.group, out_splits=self.sent, in_splits=self.received)

    def summed(self, rows: Tensor, tokens: int) -> Tensor:
        """Return, for each of so many tokens, the sum of its rows [S, D], rank after rank, in float32 or wider."""
        total = rows.new_zeros(
            (tokens, *rows.shape[1:]), dtype=torch.promote_types(rows.dtype, torch.float32)
        )
        for of_rank, places in zip(rows.split(self.sent), self.tokens.split(self.sent), strict=True):
            total[places] += of_rank  # a token has one row a rank at most
        return total.to(rows.dtype)


def exchange_of(rows: Rows, group: dist.ProcessGroup) -> Exchange:
    """Tell all ranks how many rows and visits come to them. The host waits for the numbers, once."""
    if not has_values(rows.counts):
        count, remainder = divmod(len(rows.tokens), group.size())
        counts = [count + (rank < remainder) for rank in range(group.size())]
        return Exchange(rows.tokens, counts, counts, group, None)
    counts = torch.stack([rows.counts, rows.visits], 1)
    received = torch.empty_like(counts)
    all_to_all_into(received, counts, group)
    sent, _, arriving, visits = torch.cat([counts, received], 1).t().tolist()
    return Exchange(rows.tokens, sent, arriving, group, sum(visits))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, exchange):
        ctx.exchange, ctx.tokens = exchange, len(hidden)
        return exchange.there(hidden[exchange.tokens])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.exchange.summed(ctx.exchange.back(grad), ctx.tokens), None


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, tokens):
        ctx.save_for_backward(tokens)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.saved_tensors  # noqa: B018
        return grad, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, tokens, exchange):
        ctx.exchange = exchange
        return exchange.summed(exchange.back(rows), tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.exchange.there(grad[ctx.exchange.tokens]), None, None


def dispatch(hidden: Tensor, exchange: Exchange) -> Tensor:
    """Send tokens [T, D] to the ranks of their experts; backward sums the gradients that come back.

    Returns the rows that came here, [R, D], in the order of the ranks they are from.
    """
    return _Dispatch.apply(hidden, exchange)


def meet(rows: Tensor, exchange: Exchange) -> Tensor:
    """Return the same rows; where a block is recomputed, all ranks begin with it in the backward of this."""
    return _Meet.apply(rows, exchange.tokens)


def combine(rows: Tensor, tokens: int, exchange: Exchange) -> Tensor:
    """Send what experts made of rows, [R, D], back to their tokens, and sum it up.

    Returns [T, D], the sum over ranks in their order, in float32 until it is rounded once.
    """
    return _Combine.apply(rows, tokens, exchange)
