"""The structure module: residues that start in one place find theirs, block after block (Algorithms 20 and 23)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_apps.applications.protein.model.frames import Frames, rotation_of, turned
from cai_apps.applications.protein.model.layers import linear
from cai_apps.applications.protein.model.points import PointAttention

ANGSTROMS = 10.0
"""The unit in which the module moves residues, in angstroms."""


@dataclass(frozen=True)
class StructureSizes:
    """Sizes of the structure module.

    Args:
        c_s, c_z: widths of the sequence and the pair.
        head, heads, qk_point_count, v_point_count: the arguments of `PointAttention` with these names.
        blocks: rounds with the same weights.
        dropout: rate.
        angles: width inside the network of angles; its blocks.
    """

    c_s: int = 384
    c_z: int = 128
    head: int = 16
    heads: int = 12
    qk_point_count: int = 4
    v_point_count: int = 8
    blocks: int = 8
    dropout: float = 0.1
    angles: int = 128
    angle_blocks: int = 2


@dataclass(frozen=True)
class Placed:
    """What a block of the structure module says.

    Args:
        frames: the frames of the backbone [B, R], angstroms.
        angles: sines and cosines of the seven torsions [B, R, 7, 2], of length 1.
        raw_angles: the same as they came.
    """

    frames: Frames
    angles: Tensor
    raw_angles: Tensor


@dataclass(frozen=True)
class Folded:
    """What the structure module says.

    Args:
        s: the sequence after the last block, [B, R, c_s].
        blocks: the output of each block.
        groups: the frames of the eight rigid groups of a residue after the last block [B, R, 8], angstroms.
        atoms: the positions of its 14 atoms after the last block [B, R, 14, 3], angstroms.
    """

    s: Tensor
    blocks: list[Placed]
    groups: Frames
    atoms: Tensor


class SequenceTransition(nn.Module):
    """Lines 8 and 9 of Algorithm 20."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.first = linear(width, width, initial="relu")
        self.second = linear(width, width, initial="relu")
        self.third = linear(width, width, initial="final")
        self.norm = nn.LayerNorm(width)

    def forward(self, s: Tensor) -> Tensor:
        s = s + self.third(F.relu(self.second(F.relu(self.first(s)))))
        return self.norm(F.dropout(s, self.dropout, self.training))


class AngleBlock(nn.Module):
    """Line 12 of Algorithm 20."""

    def __init__(self, width: int):
        super().__init__()
        self.first = linear(width, width, initial="relu")
        self.second = linear(width, width, initial="final")

    def forward(self, a: Tensor) -> Tensor:
        return a + self.second(F.relu(self.first(F.relu(a))))


class Angles(nn.Module):
    """Sines and cosines of seven torsions: lines 11 to 14 of Algorithm 20."""

    def __init__(self, c_s: int, width: int, blocks: int):
        super().__init__()
        self.now = linear(c_s, width)
        self.start = linear(c_s, width)
        self.blocks = nn.Sequential(*(AngleBlock(width) for _ in range(blocks)))
        self.out = linear(width, 14)

    def forward(self, s: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """s as it is and as it was, [B, R, c_s] -> [B, R, 7, 2] as they come, and of length 1."""
        a = self.blocks(self.now(F.relu(s)) + self.start(F.relu(start)))
        raw = self.out(F.relu(a)).unflatten(-1, (7, 2))
        return raw, raw / raw.square().sum(-1, keepdim=True).clamp(min=1e-8).sqrt()


class StructureModule(nn.Module):
    """s and z -> where the backbone is and how side chains turn, after each block, and the atoms at the end."""

    def __init__(self, sizes: StructureSizes):
        super().__init__()
        c_s = sizes.c_s
        self.rounds, self.dropout = sizes.blocks, sizes.dropout
        self.norm = nn.LayerNorm(c_s)
        self.norm_pair = nn.LayerNorm(sizes.c_z)
        self.first = linear(c_s, c_s)
        self.attention = PointAttention(
            c_s, sizes.c_z, sizes.head, sizes.heads, sizes.qk_point_count, sizes.v_point_count
        )
        self.norm_attention = nn.LayerNorm(c_s)
        self.transition = SequenceTransition(c_s, sizes.dropout)
        self.move = linear(c_s, 6, initial="final")
        self.angles = Angles(c_s, sizes.angles, sizes.angle_blocks)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, residue: Tensor) -> Folded:
        """What it says of a sequence and a pair. Frames are float32 or wider.

        Args:
            s, z, mask: [B, R, c_s], [B, R, R, c_z], [B, R].
            residue: numbers of the residues [B, R].
        """
        start, z = self.norm(s), self.norm_pair(z)
        s = self.first(start)
        origin = s.new_zeros(*s.shape[:2], 3, dtype=torch.promote_types(s.dtype, torch.float32))
        origin.requires_grad_(s.requires_grad)  # as in later blocks: else the first is compiled apart
        quaternion = torch.cat([torch.ones_like(origin[..., :1]), origin.detach()], -1)
        placements = []
        for _ in range(self.rounds):
            s, quaternion, origin, rotation, raw, angles = self.block(s, z, start, quaternion, origin, mask)
            placements.append(Placed(Frames(rotation, origin).scaled(ANGSTROMS), angles, raw))
            quaternion = (
                quaternion.detach()
            )  # line 20 of Algorithm 20: a turn learns from its own block alone
        groups = groups_of(placements[-1].frames, placements[-1].angles, residue)
        return Folded(s, placements, groups, atoms_of(groups, residue))

    def block(
        self, s: Tensor, z: Tensor, start: Tensor, quaternion: Tensor, origin: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A round: s, quaternion, origin as they become, the rotation, angles as they came and of length 1."""
        frames = Frames(rotation_of(quaternion), origin)
        s = s + self.attention(s, z, frames, mask)
        s = self.transition(self.norm_attention(F.dropout(s, self.dropout, self.training)))
        turn, shift = self.move(s).to(origin.dtype).split(3, -1)
        quaternion = turned(quaternion, turn)
        raw, angles = (torsions.to(origin.dtype) for torsions in self.angles(s, start))
        return s, quaternion, frames.apply(shift), rotation_of(quaternion), raw, angles
