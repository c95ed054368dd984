"""Gated attention along one dimension of rows, as alignments and pairs have it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cai_apps.applications.protein.model.layers import linear
from cai_kernels import pair_bias_attention

MASKED = 1e9
"""Taken off the scores of what is masked: nothing is left of them, and where all are masked all count alike."""


class GatedAttention(nn.Module):
    """Attention of N heads inside each row of x [B, rows, L, width], with a gate on what a head says.

    Args:
        width: the width of x.
        heads: N.
        head: width of a head.
    """

    def __init__(self, width: int, heads: int, head: int):
        super().__init__()
        self.heads = heads
        inner = heads * head
        self.to_q = linear(width, inner, bias=False, initial="glorot")
        self.to_k = linear(width, inner, bias=False, initial="glorot")
        self.to_v = linear(width, inner, bias=False, initial="glorot")
        self.gate = linear(width, inner, initial="gate")
        self.out = linear(inner, width, initial="final")

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """The update of x, [B, rows, L, width].

        Args:
            mask: [B, rows, L].
            bias: [B, N, L, L], added to the scores of all rows.
        """
        q, k, v, gate = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(2, 3)
            for layer in (self.to_q, self.to_k, self.to_v, self.gate)
        )
        out = pair_bias_attention(q, k, v, bias, MASKED * (mask.to(x.dtype) - 1), gate)
        assert isinstance(out, Tensor)
        return self.out(out.transpose(2, 3).flatten(-2))


class GlobalAttention(nn.Module):
    """Attention along the sequences of an alignment with one query for all of a residue: Algorithm 19.

    Args:
        width: the width of x.
        heads: N, which share keys and values.
        head: width of a head.
    """

    def __init__(self, width: int, heads: int, head: int):
        super().__init__()
        self.heads = heads
        self.to_q = linear(width, heads * head, bias=False, initial="glorot")
        self.to_k = linear(width, head, bias=False, initial="glorot")
        self.to_v = linear(width, head, bias=False, initial="glorot")
        self.gate = linear(width, heads * head, initial="gate")
        self.out = linear(heads * head, width, initial="final")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The update of x, [B, R, S, width]; mask [B, R, S]."""
        mask = mask.to(x.dtype)
        mean = (x * mask[..., None]).sum(-2) / (mask.sum(-1, keepdim=True) + 1e-8)
        k, v = self.to_k(x), self.to_v(x)
        q = self.to_q(mean).unflatten(-1, (self.heads, -1)) * k.shape[-1] ** -0.5  # [B, R, N, head]
        scores = q @ k.transpose(-1, -2) + (MASKED * (mask - 1))[:, :, None]
        context = scores.softmax(-1) @ v
        gate = torch.sigmoid(self.gate(x)).unflatten(-1, (self.heads, -1))
        return self.out((context[:, :, None] * gate).flatten(-2))
