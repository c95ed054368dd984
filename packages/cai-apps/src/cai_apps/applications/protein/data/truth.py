"""What a known structure says of torsions and rigid groups, and which names its atoms should have.

Atoms are at the 14 places of `chemistry.tables`, [..., R, 14, 3] in angstroms, with a mask of those that are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cai_apps.applications.protein.chemistry import GROUPS, tables
from cai_apps.applications.protein.model.frames import Frames, from_points

N, ALPHA, C, O = range(4)  # noqa: E741
PSI, FIRST_CHI = 3, 4


def _places(x: Tensor, places: Tensor) -> Tensor:
    """Return those of the atoms x [..., R, 14, 3] that are at places [..., R, k]: [..., R, k, 3]."""
    return x.gather(-2, places[..., None].expand(*places.shape, 3))


def torsions(residue: Tensor, atoms: Tensor, atom_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sines and cosines of omega, phi, psi and chi 1 to 4 [..., R, 7, 2], and which are known [..., R, 7].

    Args:
        residue: numbers [..., R].
        atoms, atom_mask: [..., R, 14, 3] and [..., R, 14]; in float64 where it can be: angles lose digits.
    """
    table = tables(residue.device, atoms.dtype)
    mask = atom_mask.to(atoms.dtype)
    before = torch.cat([torch.zeros_like(atoms[..., :1, :, :]), atoms[..., :-1, :, :]], -3)
    before_mask = torch.cat([torch.zeros_like(mask[..., :1, :]), mask[..., :-1, :]], -2)
    both, both_mask = torch.cat([before, atoms], -2), torch.cat([before_mask, mask], -1)
    offset = 14
    backbone = residue.new_tensor([
        [ALPHA, C, offset + N, offset + ALPHA], [C, offset + N, offset + ALPHA, offset + C],
        [offset + N, offset + ALPHA, offset + C, offset + O],
    ])  # fmt: skip
    places = torch.cat([backbone.expand(*residue.shape, 3, 4), offset + table.chi[residue]], -2).flatten(-2)
    four = _places(both, places).unflatten(-2, (7, 4))
    torsion_mask = both_mask.gather(-1, places).unflatten(-1, (7, 4)).prod(-1)
    torsion_mask = torch.cat([torsion_mask[..., :3], torsion_mask[..., 3:] * table.has_chi[residue]], -1)
    frames = from_points(four[..., 1, :], four[..., 2, :], four[..., 0, :], eps=1e-8)
    sine_cosine = frames.inverted(four[..., 3, :])[..., [2, 1]]
    sine_cosine = sine_cosine / (sine_cosine.square().sum(-1, keepdim=True) + 1e-8).sqrt()
    sign = sine_cosine.new_ones(7)
    sign[2] = -1  # psi is measured to the oxygen, which lies opposite the next nitrogen
    return sine_cosine * sign[:, None], torsion_mask


@dataclass(frozen=True)
class Groups:
    """The rigid groups of a known structure.

    Args:
        frames: [..., R, 8]; other: the same where atoms that look alike have each other's names.
        known: [..., R, 8].
    """

    frames: Frames
    other: Frames
    known: Tensor


def groups(residue: Tensor, atoms: Tensor, atom_mask: Tensor) -> Groups:
    """Return the rigid groups of a known structure; the arguments are those of `torsions`."""
    table = tables(residue.device, atoms.dtype)
    base = residue.new_zeros(*residue.shape, GROUPS, 3)
    base[..., 0, :] = residue.new_tensor([C, ALPHA, N])
    base[..., PSI, :] = residue.new_tensor([ALPHA, C, O])
    base[..., FIRST_CHI:, :] = table.chi[residue][..., 1:]
    has_group = torch.zeros(*residue.shape, GROUPS, dtype=torch.bool, device=residue.device)
    has_group[..., [0, PSI]] = True
    has_group[..., FIRST_CHI:] = table.has_chi[residue]
    three = _places(atoms, base.flatten(-2)).unflatten(-2, (GROUPS, 3))
    group_mask = (
        atom_mask.to(atoms.dtype).gather(-1, base.flatten(-2)).unflatten(-1, (GROUPS, 3)).prod(-1) * has_group
    )
    frames = from_points(three[..., 0, :], three[..., 1, :], three[..., 2, :], eps=1e-8)
    back = torch.eye(3, dtype=atoms.dtype, device=atoms.device).repeat(GROUPS, 1, 1)
    back[0, 0, 0] = back[
        0, 2, 2
    ] = -1  # the backbone's first axis ends at the carbon, not at the alpha carbon
    frames = Frames(frames.rotation @ back, frames.origin)
    half = torch.eye(3, dtype=atoms.dtype, device=atoms.device).expand(*residue.shape, GROUPS, 3, 3).clone()
    pi_periodic = table.alike[residue]
    half[..., FIRST_CHI:, 1, 1] = half[..., FIRST_CHI:, 2, 2] = 1 - 2 * pi_periodic.to(atoms.dtype)
    return Groups(frames, Frames(frames.rotation @ half, frames.origin), group_mask)


@dataclass(frozen=True)
class Named:
    """A known structure with the names that fit a predicted one best (Algorithm 26).

    Args:
        atoms, known: [..., R, 14, 3] and [..., R, 14].
        renamed: whether a residue's atoms have other names than they came with [..., R].
    """

    atoms: Tensor
    known: Tensor
    renamed: Tensor


@torch.no_grad()
def named(residue: Tensor, atoms: Tensor, atom_mask: Tensor, predicted: Tensor) -> Named:
    """Give atoms of a residue that look alike each other's names where distances to all others then fit better.

    Args:
        predicted: atoms [..., R, 14, 3].
    """
    table = tables(residue.device, atoms.dtype)
    swap = table.renamed[residue]
    other, other_known = _places(atoms, swap), atom_mask.gather(-1, swap)
    moves = (swap != torch.arange(swap.shape[-1], device=swap.device)).to(atoms.dtype)
    mask = atom_mask.to(atoms.dtype)
    off = [_off(predicted, candidate, mask * moves, mask * (1 - moves)) for candidate in (atoms, other)]
    better = off[1] < off[0]
    return Named(
        torch.where(better[..., None, None], other, atoms),
        torch.where(better[..., None], other_known, atom_mask),
        better,
    )


def _off(predicted: Tensor, true: Tensor, of: Tensor, to: Tensor) -> Tensor:
    """The sum over atoms `of` a residue and `to` all others by how much their distances differ, [..., R]."""

    def apart(x: Tensor) -> Tensor:
        flat = x.flatten(-3, -2)
        return ((x[..., :, :, None, :] - flat[..., None, None, :, :]).square().sum(-1) + 1e-10).sqrt()

    differ = ((apart(predicted) - apart(true)).square() + 1e-10).sqrt()
    return (differ * of[..., None] * to.flatten(-2)[..., None, None, :]).sum((-1, -2))
