"""What an alignment [B, S, R, c_m] does with itself and gives to the pair: Algorithms 7, 8, 10, 19."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cai_apps.applications.protein.model.attention import GatedAttention, GlobalAttention
from cai_apps.applications.protein.model.layers import linear


class RowAttention(nn.Module):
    """Attention between the residues of each sequence, biased by the pair: Algorithm 7."""

    def __init__(self, c_m: int, c_z: int, heads: int, head: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.norm_pair = nn.LayerNorm(c_z)
        self.bias = linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads, head)

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        """The update of m; mask [B, S, R]."""
        bias = self.bias(self.norm_pair(z)).permute(0, 3, 1, 2)
        return self.attention(self.norm(m), mask, bias)


class ColumnAttention(nn.Module):
    """Attention between the sequences at each residue: Algorithm 8, or 19 with one query for all of a residue."""

    def __init__(self, c_m: int, heads: int, head: int, *, one_query: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.attention = (GlobalAttention if one_query else GatedAttention)(c_m, heads, head)

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        """The update of m; mask [B, S, R]."""
        columns = self.norm(m.transpose(1, 2))
        return self.attention(columns, mask.transpose(1, 2)).transpose(1, 2)


class OuterProductMean(nn.Module):
    """What two residues have in common over the sequences: Algorithm 10."""

    def __init__(self, c_m: int, c_z: int, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.left = linear(c_m, inner)
        self.right = linear(c_m, inner)
        self.out = linear(inner * inner, c_z, initial="final")

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        """The update of the pair, [B, R, R, c_z]; mask [B, S, R]."""
        mask = mask.to(m.dtype)
        normed = self.norm(m)
        left_projection, right_projection = (
            layer(normed) * mask[..., None] for layer in (self.left, self.right)
        )
        outer = torch.einsum("bsic,bsjd->bijcd", left_projection, right_projection).flatten(-2)
        count = torch.einsum("bsi,bsj->bij", mask, mask)[..., None]
        return self.out(outer) / (count + 1e-3)
