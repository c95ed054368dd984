"""What no protein does: bonds too long or short, angles too wide or narrow, atoms in one place (section 1.9.11)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cai_apps.applications.protein.bonds import DEVIATIONS, OVERLAP, bounds
from cai_apps.applications.protein.chemistry import LETTERS, tables
from cai_apps.applications.protein.data.truth import ALPHA, C, N

LENGTH, LENGTH_PROLINE = (1.329, 0.014), (1.341, 0.016)
"""Lengths of the bond between two residues, and of one to a proline: mean and standard deviation, angstroms."""
COSINE_AT_C, COSINE_AT_N = (-0.4473, 0.0311), (-0.5203, 0.0353)
"""Cosines of the angles CA-C-N and C-N-CA: mean and standard deviation. OpenFold holds the first to 0.014, the
deviation of the bond's length."""
SULFUR = 5
"""The place whose atoms may come close: cysteine's sulfur. As AlphaFold does, this counts for any residue's."""
SMALL, CLOSE = 1e-6, 1e-10
"""What is added under roots and to counts."""


@dataclass(frozen=True)
class Violations:
    """Violations of a structure, before they are weighted.

    Args:
        bonds: mean error of the lengths between residues beyond what is allowed, angstroms [B].
        angles_c, angles_n: mean errors of the cosines of CA-C-N and C-N-CA beyond what is allowed [B].
        clashes: errors of atoms too close or, in a residue, too far apart, a mean over atoms, angstroms [B].
        residues: whether a residue has any of these [B, R].
    """

    bonds: Tensor
    angles_c: Tensor
    angles_n: Tensor
    clashes: Tensor
    residues: Tensor

    @property
    def loss(self) -> Tensor:
        """The sum, [B]."""
        return self.bonds + self.angles_c + self.angles_n + self.clashes


def violations(residue: Tensor, index: Tensor, atoms: Tensor) -> Violations:
    """Return the violations of atoms at the 14 places of each residue.

    Args:
        residue: numbers [B, R]; an unknown one has no atoms.
        index: places in the chain [B, R]; residues whose places differ by one have a bond.
        atoms: [B, R, 14, 3], angstroms, float32 or wider.
    """
    atom_mask = tables(residue.device).there[residue].to(atoms.dtype)
    between, broken = _between(residue, index, atoms, atom_mask)
    clash, close = _clashes(residue, index, atoms, atom_mask)
    bend, strained = _within(residue, atoms, atom_mask)
    clashes = 2 * (clash + bend) / (SMALL + atom_mask.sum((-1, -2)))  # each error is of two atoms
    return Violations(*between, clashes, broken | close | strained)


def _between(residue: Tensor, index: Tensor, atoms: Tensor, atom_mask: Tensor) -> tuple[list[Tensor], Tensor]:
    """Errors of the bond, of CA-C-N and of C-N-CA, [B] each; residues beside one that is off [B, R]."""
    alpha, c = atoms[:, :-1, ALPHA], atoms[:, :-1, C]
    n, next_alpha = atoms[:, 1:, N], atoms[:, 1:, ALPHA]
    joined = (
        ((index[:, 1:] - index[:, :-1]) == 1).to(atoms.dtype) * atom_mask[:, :-1, C] * atom_mask[:, 1:, N]
    )
    proline = residue[:, 1:] == LETTERS.index("P")
    mean, deviation = (
        torch.where(proline, torch.full_like(joined, special), torch.full_like(joined, usual))
        for usual, special in zip(LENGTH, LENGTH_PROLINE, strict=True)
    )
    to_n, length = _direction(c, n)
    to_alpha, _ = _direction(c, alpha)
    onward, _ = _direction(n, next_alpha)
    at_c, at_n = (to_alpha * to_n).sum(-1), (-to_n * onward).sum(-1)
    checked = (
        (length, mean, deviation, joined),
        (at_c, *COSINE_AT_C, joined * atom_mask[:, :-1, ALPHA]),
        (at_n, *COSINE_AT_N, joined * atom_mask[:, 1:, ALPHA]),
    )
    errors, violated = [], torch.zeros_like(proline)
    for value, ideal, spread, mask in checked:
        error = ((value - ideal).square() + SMALL).sqrt() - DEVIATIONS * spread
        errors.append((mask * F.relu(error)).sum(-1) / (mask.sum(-1) + SMALL))
        violated = violated | ((error > 0) & (mask > 0))
    return errors, F.pad(violated, (0, 1)) | F.pad(violated, (1, 0))


def _direction(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the direction from `start` to `end`, of length one [..., 3], and the distance [...]."""
    vector = end - start
    length = (SMALL + vector.square().sum(-1)).sqrt()
    return vector / length[..., None], length


def _clashes(residue: Tensor, index: Tensor, atoms: Tensor, atom_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much atoms of different residues lie too close, summed over pairs [B]; residues that do [B, R]."""
    shape = atom_mask.shape
    flat, radius = atoms.flatten(1, 2), bounds(atoms.device, atoms.dtype).radius[residue].flatten(1, 2)
    distance = (CLOSE + (flat[:, :, None] - flat[:, None]).square().sum(-1)).sqrt()
    allowed = _may_clash(index, atom_mask)
    lower = radius[:, :, None] + radius[:, None] - OVERLAP
    error = allowed * F.relu(lower - distance)
    clashing_atoms = (error > 0).any(-1) | (error > 0).any(-2)
    return error.sum((-1, -2)), clashing_atoms.view(shape).any(-1)


def _may_clash(index: Tensor, atom_mask: Tensor) -> Tensor:
    """Which pairs of atoms count, each once: of different residues, without a bond [B, 14 R, 14 R]."""
    place = torch.arange(atom_mask.shape[-1], device=index.device).expand(atom_mask.shape).flatten(1, 2)
    residue_index = index[..., None].expand(atom_mask.shape).flatten(1, 2)
    rows, columns = (slice(None), slice(None), None), (slice(None), None, slice(None))
    bond = (residue_index[rows] + 1 == residue_index[columns]) & (place[rows] == C) & (place[columns] == N)
    bridge = (place[rows] == SULFUR) & (place[columns] == SULFUR)
    flat_mask = atom_mask.flatten(1, 2)
    return (
        flat_mask[rows]
        * flat_mask[columns]
        * ((residue_index[rows] < residue_index[columns]) & ~bond & ~bridge).to(flat_mask.dtype)
    )


def _within(residue: Tensor, atoms: Tensor, atom_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much atoms of a residue lie too close or too far apart, summed over pairs [B]; residues that do
    [B, R]."""
    limits = bounds(atoms.device, atoms.dtype)
    lower, upper = limits.lower[residue], limits.upper[residue]
    distance = (CLOSE + (atoms[..., :, None, :] - atoms[..., None, :, :]).square().sum(-1)).sqrt()
    off_diagonal = 1 - torch.eye(atoms.shape[-2], dtype=atoms.dtype, device=atoms.device)
    mask = atom_mask[..., :, None] * atom_mask[..., None, :] * off_diagonal
    error = mask * (F.relu(lower - distance) + F.relu(distance - upper))
    return error.sum((-1, -2, -3)), (error > 0).any(-1).any(-1)
