"""What goes into the trunk: features, relative positions, what an earlier round found (Algorithms 3, 4, 32)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cai_apps.applications.protein.model.layers import linear

BEYOND = 1e8
"""Squared angstroms; where the last bin of distances ends."""


def distance_bins(x: Tensor, first: float, last: float, count: int) -> Tensor:
    """Return the bin of the distance between each two points, one-hot [..., n, n, count]; all 0 below `first`.

    Args:
        x: points [..., n, 3], angstroms.
        first, last: starts of the first and the last bin, angstroms; the last has no end.
    """
    squared = (x[..., :, None, :] - x[..., None, :, :]).square().sum(-1, keepdim=True)
    low = torch.linspace(first, last, count, dtype=x.dtype, device=x.device).square()
    high = torch.cat([low[1:], low.new_tensor([BEYOND])])
    return ((squared > low) & (squared < high)).to(x.dtype)


class InputEmbedder(nn.Module):
    """Features of the residues and of the alignment -> m and z: Algorithm 3, with relative positions (4).

    Args:
        target: features of a residue.
        alignment: features of a residue in a sequence of the alignment.
        c_m, c_z: widths.
        reach: residues further apart than this count as this far.
    """

    def __init__(self, target: int, alignment: int, c_m: int, c_z: int, reach: int = 32):
        super().__init__()
        self.reach = reach
        self.left = linear(target, c_z)
        self.right = linear(target, c_z)
        self.target = linear(target, c_m)
        self.alignment = linear(alignment, c_m)
        self.position = linear(2 * reach + 1, c_z)

    def forward(self, target: Tensor, index: Tensor, alignment: Tensor) -> tuple[Tensor, Tensor]:
        """target [B, R, ·], index of each residue [B, R], alignment [B, S, R, ·] -> m, z."""
        apart = (index[:, :, None] - index[:, None]).clamp(-self.reach, self.reach) + self.reach
        position = self.position(F.one_hot(apart.long(), 2 * self.reach + 1).to(target.dtype))
        z = position + self.left(target)[:, :, None] + self.right(target)[:, None]
        return self.alignment(alignment) + self.target(target)[:, None], z


class RecyclingEmbedder(nn.Module):
    """What the round before found, for m's first sequence and z: Algorithm 32.

    Args:
        c_m, c_z: widths.
        first, last, bins: starts of the first and the last bin of distances between beta carbons, angstroms, and the
            number of bins.
    """

    def __init__(self, c_m: int, c_z: int, first: float = 3.25, last: float = 20.75, bins: int = 15):
        super().__init__()
        self.bins = (first, last, bins)
        self.norm = nn.LayerNorm(c_m)
        self.norm_pair = nn.LayerNorm(c_z)
        self.distance = linear(bins, c_z)

    def forward(self, m: Tensor, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """m's first sequence [B, R, c_m], z [B, R, R, c_z], beta carbons x [B, R, 3] -> what is added to both."""
        distogram = distance_bins(x, *self.bins).to(z.dtype)
        return self.norm(m), self.norm_pair(z) + self.distance(distogram)
