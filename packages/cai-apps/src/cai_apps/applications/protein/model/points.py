"""Invariant point attention: residues look at what others are and at where their points lie (Algorithm 22)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cai_apps.applications.protein.model.frames import Frames
from cai_apps.applications.protein.model.layers import linear

MASKED = 1e5
"""Taken off the scores of residues that are not there."""
ONE = 0.541324854612918
"""The number whose softplus is 1."""


class PointAttention(nn.Module):
    """Attention of N heads whose points move with the residues, so that no motion of the whole changes it.

    Args:
        c_s, c_z: widths of the sequence and the pair.
        head: width of a head.
        heads: N.
        qk_point_count, v_point_count: points of a head for queries and keys, and for values.
    """

    def __init__(
        self,
        c_s: int,
        c_z: int,
        head: int = 16,
        heads: int = 12,
        qk_point_count: int = 4,
        v_point_count: int = 8,
    ):
        super().__init__()
        self.heads, self.qk_point_count, self.v_point_count = heads, qk_point_count, v_point_count
        self.to_q = linear(c_s, heads * head)
        self.to_kv = linear(c_s, 2 * heads * head)
        self.q_points = linear(c_s, 3 * heads * qk_point_count)
        self.kv_points = linear(c_s, 3 * heads * (qk_point_count + v_point_count))
        self.bias = linear(c_z, heads)
        self.weight = nn.Parameter(torch.full((heads,), ONE))
        self.out = linear(heads * (c_z + head + 4 * v_point_count), c_s, initial="final")

    def forward(self, s: Tensor, z: Tensor, frames: Frames, mask: Tensor) -> Tensor:
        """The update of s [B, R, c_s]. Points and scores are computed in the dtype of the frames.

        Args:
            z: [B, R, R, c_z].
            frames: [B, R], float32 or wider.
            mask: [B, R].
        """
        wide = frames.origin.dtype
        q = self.to_q(s).unflatten(-1, (self.heads, -1))
        k, v = self.to_kv(s).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        at = frames[..., None, None]
        q_points = at.apply(self._points(self.q_points(s)).to(wide))
        k_points, v_points = at.apply(self._points(self.kv_points(s)).to(wide)).split(
            [self.qk_point_count, self.v_point_count], -2
        )
        scores = self._scores(q.to(wide), k.to(wide), q_points, k_points) + math.sqrt(1 / 3) * self.bias(z)
        mask = mask.to(scores.dtype)
        both = MASKED * (mask[:, :, None] * mask[:, None] - 1)
        share = (scores + both[..., None]).softmax(2)  # [B, R, R, N]
        values = torch.einsum("bijn,bjnc->binc", share.to(v.dtype), v)
        points = at.inverted(torch.einsum("bijn,bjnpx->binpx", share, v_points))
        length = (points.square().sum(-1) + 1e-8).sqrt()
        pairs = torch.einsum("bijn,bijc->binc", share.to(z.dtype), z)
        parts = [values, *points.unbind(-1), length, pairs]
        return self.out(torch.cat([part.flatten(2).to(s.dtype) for part in parts], -1))

    def _points(self, x: Tensor) -> Tensor:
        """[B, R, 3 · N · points], all x before all y -> [B, R, N, points, 3]."""
        return torch.stack(x.chunk(3, -1), -1).unflatten(2, (self.heads, -1))

    def _scores(self, q: Tensor, k: Tensor, q_points: Tensor, k_points: Tensor) -> Tensor:
        """[B, R, R, N]: how alike two residues are, less how far their points lie apart."""
        similarity = torch.einsum("binc,bjnc->bijn", q, k) * math.sqrt(1 / (3 * q.shape[-1]))
        squared_distance = (q_points[:, :, None] - k_points[:, None]).square().sum((-1, -2))
        return (
            similarity
            - 0.5 * math.sqrt(2 / (27 * self.qk_point_count)) * F.softplus(self.weight) * squared_distance
        )
