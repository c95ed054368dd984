"""Structures of related proteins: each in a small stack of its own (Algorithm 16), then into the pair (17)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from cai_apps.applications.protein.model.evoformer import PairSizes
from cai_apps.applications.protein.model.layers import Transition, linear, shared_dropout
from cai_apps.applications.protein.model.pair import TriangleAttention, TriangleMultiplication

MASKED = 1e5
"""Taken off the scores of templates that are not there."""
PAIR = PairSizes(c_z=64, triangle=64, heads=4, head=16, factor=2)
"""Sizes of a template's pair."""


class TemplateBlock(nn.Module):
    """A block of the stack for a template's pair: attention comes before multiplication."""

    def __init__(self, sizes: PairSizes):
        super().__init__()
        c_t, heads, head = sizes.c_z, sizes.heads, sizes.head
        self.dropout = sizes.dropout
        self.starting = TriangleAttention(c_t, heads, head, starting=True)
        self.ending = TriangleAttention(c_t, heads, head, starting=False)
        self.outgoing = TriangleMultiplication(c_t, sizes.triangle, outgoing=True)
        self.incoming = TriangleMultiplication(c_t, sizes.triangle, outgoing=False)
        self.transition = Transition(c_t, sizes.factor)

    def forward(self, t: Tensor, mask: Tensor) -> Tensor:
        """t [B, R, R, c_t] and its mask [B, R, R] -> t."""
        for update, dim in ((self.starting, 1), (self.ending, 2), (self.outgoing, 1), (self.incoming, 1)):
            t = t + shared_dropout(update(t, mask), self.dropout, self.training, dim)
        return t + self.transition(t)


class TemplateAttention(nn.Module):
    """Each pair of residues looks at that pair in all templates: Algorithm 17."""

    def __init__(self, c_z: int, c_t: int, heads: int, head: int):
        super().__init__()
        self.heads = heads
        inner = heads * head
        self.to_q = linear(c_z, inner, bias=False, initial="glorot")
        self.to_k = linear(c_t, inner, bias=False, initial="glorot")
        self.to_v = linear(c_t, inner, bias=False, initial="glorot")
        self.out = linear(inner, c_z, initial="final")

    def forward(self, z: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """The update of z [B, R, R, c_z] from t [B, T, R, R, c_t]; mask [B, T]: which templates there are."""
        templates = t.permute(0, 2, 3, 1, 4)
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1))
            for layer, x in ((self.to_q, z), (self.to_k, templates), (self.to_v, templates))
        )
        scores = (q[..., None, :, :] * k).sum(-1) * q.shape[-1] ** -0.5  # [B, R, R, T, N]
        scores = scores + (MASKED * (mask.to(z.dtype) - 1))[:, None, None, :, None]
        return self.out((scores.softmax(-2)[..., None] * v).sum(-3).flatten(-2))


@dataclass(frozen=True)
class TemplateSizes:
    """Sizes of the part that reads templates.

    Args:
        angles, pair: features of a residue and of two residues.
        blocks, sizes: the number of blocks of the stack, and the sizes of one.
        heads, head: the number of heads of the attention to templates, and the width of one.
    """

    angles: int = 57
    pair: int = 88
    blocks: int = 2
    sizes: PairSizes = PAIR
    heads: int = 4
    head: int = 16


class TemplateEmbedder(nn.Module):
    """Templates -> an update of the pair, and sequences that go into the alignment: lines 7 to 13 of Algorithm 2."""

    def __init__(self, sizes: TemplateSizes, c_m: int, c_z: int):
        super().__init__()
        c_t = sizes.sizes.c_z
        self.angles = linear(sizes.angles, c_m, initial="relu")
        self.angles_out = linear(c_m, c_m, initial="relu")
        self.pair = linear(sizes.pair, c_t, initial="relu")
        self.blocks = nn.ModuleList(TemplateBlock(sizes.sizes) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(c_t)
        self.attention = TemplateAttention(c_z, c_t, sizes.heads, sizes.head)

    def forward(self, z: Tensor, pair: Tensor, z_mask: Tensor, template_mask: Tensor) -> Tensor:
        """The update of z, zero where no template is there.

        Args:
            z: [B, R, R, c_z], and its mask [B, R, R].
            pair: features [B, T, R, R, ·].
            template_mask: [B, T].
        """
        batch, templates = pair.shape[:2]
        t = self.pair(pair).flatten(0, 1)
        mask = z_mask[:, None].expand(batch, templates, *z_mask.shape[1:]).flatten(0, 1)
        for block in self.blocks:
            t = block(t, mask)
        update = self.attention(z, self.norm(t).unflatten(0, (batch, templates)), template_mask)
        return update * (template_mask.sum(-1) > 0).to(update.dtype)[:, None, None, None]

    def sequences(self, angles: Tensor) -> Tensor:
        """Features of angles [B, T, R, ·] -> [B, T, R, c_m]."""
        return self.angles_out(F.relu(self.angles(angles)))
