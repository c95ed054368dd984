"""The whole model, round after round: Algorithm 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cai_apps.applications.protein.chemistry import LETTERS
from cai_apps.applications.protein.model.embed import InputEmbedder, RecyclingEmbedder
from cai_apps.applications.protein.model.evoformer import EXTRA, BlockSizes, Evoformer
from cai_apps.applications.protein.model.heads import Heads, Said
from cai_apps.applications.protein.model.layers import linear
from cai_apps.applications.protein.model.structure import Folded, StructureModule, StructureSizes
from cai_apps.applications.protein.model.template import TemplateEmbedder, TemplateSizes

ALPHA, BETA = 1, 4
"""Places of the alpha and beta carbon among a residue's 14 atoms."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole model; by default AlphaFold's.

    Args:
        target, alignment, extra: features of a residue, in a sequence of the alignment, in an extra sequence.
        block, blocks: sizes of a block of the Evoformer, and the number of blocks.
        extra_block, extra_blocks: the same for the stack of extra sequences.
        template: sizes of the part that reads templates; None: there is none.
        structure: sizes of the structure module.
        errors: whether aligned errors are predicted.
    """

    target: int = 22
    alignment: int = 49
    extra: int = 25
    block: BlockSizes = field(default_factory=BlockSizes)
    blocks: int = 48
    extra_block: BlockSizes = EXTRA
    extra_blocks: int = 4
    template: TemplateSizes | None = field(default_factory=TemplateSizes)
    structure: StructureSizes = field(default_factory=StructureSizes)
    errors: bool = True


@dataclass(frozen=True)
class Templates:
    """Features of related structures.

    Args:
        pair: [B, T, R, R, 88].
        angles: [B, T, R, 57].
        known: whether a template has psi of a residue [B, T, R].
        there: [B, T].
    """

    pair: Tensor
    angles: Tensor
    known: Tensor
    there: Tensor


@dataclass(frozen=True)
class Features:
    """What one round reads.

    Args:
        residue: numbers of the residues [B, R]; mask: [B, R].
        index: their places in the chain [B, R].
        target: [B, R, 22].
        alignment: [B, S, R, 49]; alignment_mask: [B, S, R].
        extra: [B, E, R, 25]; extra_mask: [B, E, R].
        templates: None: there are none.
    """

    residue: Tensor
    mask: Tensor
    index: Tensor
    target: Tensor
    alignment: Tensor
    alignment_mask: Tensor
    extra: Tensor
    extra_mask: Tensor
    templates: Templates | None = None


@dataclass(frozen=True)
class Round:
    """What one round found.

    Args:
        m, z, s: the output of the trunk, [B, S, R, c_m], [B, R, R, c_z], [B, R, c_s].
        folded: the output of the structure module.
        scores: the output of the heads.
    """

    m: Tensor
    z: Tensor
    s: Tensor
    folded: Folded
    scores: Said


class AlphaFold(nn.Module):
    """AlphaFold 2 of one chain."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        c_m, c_z, c_s = sizes.block.c_m, sizes.block.pair.c_z, sizes.structure.c_s
        self.input = InputEmbedder(sizes.target, sizes.alignment, c_m, c_z)
        self.recycling = RecyclingEmbedder(c_m, c_z)
        self.template = None if sizes.template is None else TemplateEmbedder(sizes.template, c_m, c_z)
        self.extra = linear(sizes.extra, sizes.extra_block.c_m)
        self.extra_stack = Evoformer(sizes.extra_block, sizes.extra_blocks, c_s=None)
        self.evoformer = Evoformer(sizes.block, sizes.blocks, c_s)
        self.structure = StructureModule(sizes.structure)
        self.heads = Heads(c_m, c_z, c_s, errors=sizes.errors)

    def forward(self, rounds: Sequence[Features]) -> Round:
        """Rounds one after the other, each with its own draw of the alignment; the last alone has gradients.

        Args:
            rounds: features of each round, all of one batch; the pair has the same shape in all.
        """
        before: Round | None = None
        for features in rounds[:-1]:
            with torch.no_grad():
                before = self.round(features, before)
        return self.round(rounds[-1], before)

    def round(self, features: Features, before: Round | None) -> Round:
        """One round, with what the one before found."""
        m, z = self.input(features.target, features.index, features.alignment)
        first, pair = self._recycled(m, z, features.residue, before)
        m = torch.cat([m[:, :1] + first[:, None], m[:, 1:]], 1)
        z = z + pair
        mask = features.mask
        z_mask = mask[:, :, None] * mask[:, None]
        m_mask, sequences = features.alignment_mask, m.shape[1]
        if self.template is not None and features.templates is not None:
            templates = features.templates
            z = z + self.template(z, templates.pair, z_mask, templates.there)
            m = torch.cat([m, self.template.sequences(templates.angles)], 1)
            m_mask = torch.cat([m_mask, templates.known.to(m_mask.dtype)], 1)
        _, z, _ = self.extra_stack(self.extra(features.extra), z, features.extra_mask, z_mask)
        m, z, s = self.evoformer(m, z, m_mask, z_mask)
        assert s is not None
        m = m[:, :sequences]
        folded = self.structure(s, z, mask, features.residue)
        return Round(m, z, s, folded, self.heads(m, z, s, folded.s))

    def _recycled(self, m: Tensor, z: Tensor, residue: Tensor, before: Round | None) -> tuple[Tensor, Tensor]:
        """What the round before adds; the first one has zeros before it."""
        if before is None:
            return self.recycling(
                torch.zeros_like(m[:, 0]), torch.zeros_like(z), z.new_zeros(*residue.shape, 3)
            )
        glycine = (residue == LETTERS.index("G"))[..., None]
        atoms = before.folded.atoms
        beta = torch.where(glycine, atoms[:, :, ALPHA], atoms[:, :, BETA])
        return self.recycling(before.m[:, 0], before.z, beta)
