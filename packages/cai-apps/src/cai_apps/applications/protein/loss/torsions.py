"""Errors of torsions: Algorithm 27."""

from __future__ import annotations

import torch
from torch import Tensor

from cai_apps.applications.protein.chemistry import tables
from cai_apps.applications.protein.loss.means import mean


def torsions(
    angles: Tensor, raw: Tensor, true: Tensor, residue: Tensor, chi_mask: Tensor, mask: Tensor
) -> Tensor:
    """Squared errors of chi 1 to 4, and how far the lengths of all seven are from 1: [B].

    Args:
        angles, raw: the angles of every block of the structure module, [blocks, B, R, 7, 2]: of length 1, and as they
            came.
        true: sines and cosines of chi, [B, R, 4, 2].
        residue: numbers [B, R].
        chi_mask: 1 where a chi is known, else 0 [B, R, 4]; mask: [B, R].
    """
    turn = 1 - 2 * tables(residue.device).alike[residue].to(true.dtype)[..., None]
    off, off_turned = ((angles[..., 3:, :] - way).square().sum(-1) for way in (true, true * turn))
    chi = torch.minimum(off, off_turned).transpose(0, 1)  # [B, blocks, R, 4]
    length = ((raw.square().sum(-1) + 1e-8).sqrt() - 1).abs().transpose(0, 1)
    return 0.5 * mean(chi, chi_mask[:, None]) + 0.01 * mean(length, mask[:, None, :, None])
