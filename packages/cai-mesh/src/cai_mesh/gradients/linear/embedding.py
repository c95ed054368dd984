"""Embeddings whose gradient goes into its chunk row by row: only the rows that were looked up are touched.

torch makes a gradient of the whole table for every backward, which is then added to the chunk: at 128,256 rows of 2,048
that is 4.6 GB of memory traffic for a microbatch that looks up 16,384 of them.
"""

from __future__ import annotations

import types
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from cai_mesh.gradients.buffer import buffer_of, has_hooks


@dataclass(frozen=True)
class Rows:
    """The rule by which the gradient of a table is made, from (ids [...], dy [..., width]).

    Args:
        padding: the id whose row gets no gradient; -1: none.
    """

    padding: int = -1

    @property
    def key(self) -> str:
        return f"rows {self.padding}"

    def write_weight_grad(
        self, operands: tuple[torch.Tensor, ...], out: torch.Tensor, *, fresh: bool
    ) -> None:
        """out [rows, width] (+)= the rows of dy, each to its id.

        Rows of one id are summed first, in float32 at least and in a fixed order; so every row of `out` is added to
        once, and the result does not depend on the order in which a GPU's threads come. Nothing waits for the
        device. On a CPU it is torch's own gradient of the table.
        """
        ids, dy = operands[0].flatten(), operands[1].flatten(0, -2)
        dy = dy.to(torch.promote_types(dy.dtype, out.dtype))
        if not out.is_cuda or not ids.numel():
            table = torch.ops.aten.embedding_dense_backward(dy, ids, out.shape[0], self.padding, False)
            out.copy_(table) if fresh else out.add_(table)
            return
        if fresh:
            out.zero_()
        if self.padding >= 0:
            dy = dy * (ids != self.padding).unsqueeze(-1)
        sorted_ids, order = ids.sort(stable=True)
        place = torch.zeros_like(sorted_ids)
        place[1:] = (sorted_ids[1:] != sorted_ids[:-1]).cumsum(0)
        sums = torch.ops.aten.embedding_dense_backward(dy[order], place, len(sorted_ids), -1, False)
        # past the last of them: some row that is there, to which zeros are added
        rows = sorted_ids[-1:].expand(len(sorted_ids)).scatter(0, place, sorted_ids)
        out.index_add_(0, rows, sums.to(out.dtype))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, grad, padding):
        ctx.save_for_backward(ids)
        ctx.grad, ctx.padding, ctx.rows = grad, padding, weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        buffer, at = buffer_of(ctx.grad), ctx.grad.storage_offset()
        assert buffer is not None
        if torch.is_grad_enabled() or buffer.takes(at) is None:  # who asks wants to have it
            dw = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.rows, ctx.padding, False)
            return None, dw, None, None
        buffer.add(at, Rows(ctx.padding), (ids, dy))
        return None, None, None, None


def _forward(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    weight = self.weight
    grad = getattr(weight, "cai_grad", None)
    plain = grad is None or not torch.is_grad_enabled() or has_hooks(weight) or torch.compiler.is_compiling()
    if plain or not weight.requires_grad:
        return nn.Embedding.forward(self, input)
    return _Embedding.apply(input, weight, grad, -1 if self.padding_idx is None else self.padding_idx)


def route_embedding(module: nn.Module) -> None:
    """Let torch's own embedding write its gradient into its chunk; one with options that change rows stays as it is."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return
    options = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    if not options and "forward" not in module.__dict__:
        module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
