"""Structures of related proteins as the model reads them (sections 1.2.3 and 1.7.1, table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cai_apps.applications.protein.chemistry import GAP, LETTERS, PLACES, UNKNOWN, tables
from cai_apps.applications.protein.data import truth
from cai_apps.applications.protein.data.structures import Chain
from cai_apps.applications.protein.model.alphafold import ALPHA, BETA, Templates
from cai_apps.applications.protein.model.embed import distance_bins

FIRST, LAST, BINS = 3.25, 50.75, 39
"""Where the first and the last bin of distances begin, angstroms, and how many there are."""
NOWHERE = -1
"""The place of a residue of the query beside none of a template."""


@dataclass(frozen=True)
class Template:
    """A related structure beside the query.

    Args:
        chain: its structure.
        place: the place in the template beside each residue of the query, from 0, or `NOWHERE` [R], int64.
    """

    chain: Chain
    place: np.ndarray

    def cut(self, at: slice) -> Template:
        """Return the template beside a piece of the query."""
        return Template(self.chain, self.place[at])


def features(templates: Sequence[Template], residues: int, count: int, vectors: bool = False) -> Templates:
    """Features of templates, of a batch of one, float32.

    A torsion of which an atom is not known is what comes out with that atom at 0; the mask beside it says so.

    Args:
        templates: the first `count` are taken; where there are fewer, others are there in shape alone.
        residues: as many as the query has, or more.
        vectors: whether the directions to other alpha carbons are told; published weights were made without.
    """
    first_templates = list(templates[:count])
    residue = torch.full((count, residues), GAP)
    atoms = torch.zeros(count, residues, PLACES, 3, dtype=torch.float64)
    atom_mask = torch.zeros(count, residues, PLACES, dtype=torch.bool)
    for number, template in enumerate(first_templates):
        query_places = np.flatnonzero(template.place != NOWHERE)
        template_places = template.place[query_places]
        residue[number, query_places] = torch.from_numpy(template.chain.residue[template_places])
        atoms[number, query_places] = torch.from_numpy(template.chain.atoms[template_places]).double()
        atom_mask[number, query_places] = torch.from_numpy(template.chain.known[template_places])
    angles, psi = _angles(residue, atoms, atom_mask)
    template_mask = (torch.arange(count) < len(first_templates)).float()
    pair = _pair(residue, atoms, atom_mask, vectors)
    return Templates(*(tensor.float()[None] for tensor in (pair, angles, psi, template_mask)))


def _angles(residue: Tensor, atoms: Tensor, atom_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Residue, torsions, the same after half a turn, and which are known [T, R, 57]; whether psi is [T, R]."""
    kind = residue.clamp(max=UNKNOWN)
    turns, torsion_mask = truth.torsions(kind, atoms, atom_mask)
    pi_periodic = F.pad(tables().alike[kind], (3, 0)).to(turns.dtype)
    other = turns * (1 - 2 * pi_periodic)[..., None]
    parts = [F.one_hot(residue, GAP + 1), turns.flatten(-2), other.flatten(-2), torsion_mask]
    return torch.cat([part.to(turns.dtype) for part in parts], -1), torsion_mask[..., truth.PSI - 1]


def _pair(residue: Tensor, atoms: Tensor, atom_mask: Tensor, vectors: bool) -> Tensor:
    """Distances of beta carbons, residues and directions [T, R, R, 88], 0 where a backbone is not known."""
    glycine = residue == LETTERS.index("G")
    beta = torch.where(glycine[..., None], atoms[..., ALPHA, :], atoms[..., BETA, :])
    beta_known = torch.where(glycine, atom_mask[..., ALPHA], atom_mask[..., BETA])
    backbone_mask = _both(atom_mask[..., [truth.N, truth.ALPHA, truth.C]].all(-1)).to(atoms.dtype)
    kinds = F.one_hot(residue, GAP + 1).to(atoms.dtype)
    count = residue.shape[-1]
    frames = truth.groups(residue.clamp(max=UNKNOWN), atoms, atom_mask).frames[..., :1]
    toward = frames.inverted(atoms[..., None, :, ALPHA, :])
    length = (toward.square().sum(-1, keepdim=True) + 1e-20).sqrt()
    parts = [
        distance_bins(beta, FIRST, LAST, BINS),
        _both(beta_known)[..., None].to(atoms.dtype),
        kinds[..., None, :, :].expand(-1, count, -1, -1),
        kinds[..., None, :].expand(-1, -1, count, -1),
        toward / length * float(vectors),
        backbone_mask[..., None],
    ]
    return torch.cat(parts, -1) * backbone_mask[..., None]


def _both(mask: Tensor) -> Tensor:
    return mask[..., :, None] & mask[..., None, :]
