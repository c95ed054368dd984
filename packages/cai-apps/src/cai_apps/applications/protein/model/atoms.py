"""Atoms from backbone and torsions: Algorithm 24."""

from __future__ import annotations

import torch
from torch import Tensor

from cai_apps.applications.protein.chemistry import tables
from cai_apps.applications.protein.model.frames import Frames, product

FIRST_CHI = 4


def groups_of(backbone: Frames, angles: Tensor, residue: Tensor) -> Frames:
    """The frames of the eight rigid groups of each residue, [B, R, 8].

    Args:
        backbone: [B, R].
        angles: sines and cosines of omega, phi, psi, chi 1 to 4, [B, R, 7, 2].
        residue: numbers of the residues [B, R], int64.
    """
    table = tables(residue.device, angles.dtype)
    zero_torsion = torch.stack(
        [torch.zeros_like(angles[..., :1, 0]), torch.ones_like(angles[..., :1, 0])], -1
    )
    sine, cosine = torch.cat([zero_torsion, angles], -2).unbind(-1)
    zero, one = torch.zeros_like(sine), torch.ones_like(sine)
    rows = ([one, zero, zero], [zero, cosine, -sine], [zero, sine, cosine])
    turn = torch.stack([torch.stack(row, -1) for row in rows], -2)
    # each in the group before it
    local_frames = Frames(product(table.rotation[residue], turn), table.origin[residue])
    group_frames = [local_frames[..., group] for group in range(FIRST_CHI + 1)]
    for group in range(FIRST_CHI + 1, local_frames.origin.shape[-2]):
        group_frames.append(group_frames[-1].then(local_frames[..., group]))
    stacked = Frames(
        torch.stack([frame.rotation for frame in group_frames], -3),
        torch.stack([frame.origin for frame in group_frames], -2),
    )
    return backbone[..., None].then(stacked)


def atoms_of(groups: Frames, residue: Tensor) -> Tensor:
    """Where the 14 atoms of each residue are, [B, R, 14, 3]; 0 where there is none."""
    table = tables(residue.device, groups.origin.dtype)
    group = table.group[residue]
    chosen = Frames(
        groups.rotation.gather(-3, group[..., None, None].expand(*group.shape, 3, 3)),
        groups.origin.gather(-2, group[..., None].expand(*group.shape, 3)),
    )
    return chosen.apply(table.place[residue]) * table.there[residue][..., None]
