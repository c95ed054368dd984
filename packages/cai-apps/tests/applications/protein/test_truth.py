"""Torsions and groups of a structure give the structure back; atoms that look alike get the names that fit."""

from __future__ import annotations

import torch
from small_alphafold import drawn_frames

from cai_apps.applications.protein.chemistry import LETTERS, tables
from cai_apps.applications.protein.data import truth
from cai_apps.applications.protein.loss.torsions import torsions as torsion_loss
from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_apps.applications.protein.model.frames import Frames

RESIDUE = torch.arange(len(LETTERS)).repeat(2)


def built(seed: int) -> tuple[Frames, torch.Tensor, torch.Tensor]:
    """Backbones anywhere with torsions drawn: frames, angles and atoms of every residue twice, float64."""
    random = torch.Generator().manual_seed(seed)
    frames = drawn_frames(len(RESIDUE), seed)
    frames = Frames(frames.rotation[0].double(), frames.origin[0].double())
    turns = torch.rand(len(RESIDUE), 7, generator=random, dtype=torch.float64) * 2 * torch.pi
    angles = torch.stack([turns.sin(), turns.cos()], -1)
    return frames, angles, atoms_of(groups_of(frames, angles, RESIDUE), RESIDUE)


def test_a_structure_says_the_torsions_it_was_built_with():
    frames, angles, atoms = built(1)
    known = tables().there[RESIDUE]
    found, there = truth.torsions(RESIDUE, atoms, known)
    expected = torch.cat([torch.ones(len(RESIDUE), 3), tables().has_chi[RESIDUE]], -1)
    expected[0, :2] = 0  # nothing lies before the first
    torch.testing.assert_close(there, expected, check_dtype=False)
    own = there.clone()
    own[:, :2] = 0  # omega and phi turn about bonds to the residue before
    assert ((found - angles).abs().amax(-1) * own).max() < 2e-3  # ideal places have three digits
    groups = truth.groups(RESIDUE, atoms, known)
    built_groups = groups_of(frames, angles, RESIDUE)
    origins = (groups.frames.origin - built_groups.origin).abs().amax(-1) * groups.known
    turns = (groups.frames.rotation - built_groups.rotation).abs().amax((-1, -2)) * groups.known
    assert origins.max() < 1e-2
    assert turns.max() < 1e-2
    alike = tables().alike[RESIDUE]
    differ = (groups.other.rotation - groups.frames.rotation).abs().amax((-1, -2))[:, 4:]
    assert torch.equal(differ > 0.1, alike)


def test_an_atom_that_is_not_known_hides_its_torsions():
    _, _, atoms = built(2)
    known = tables().there[RESIDUE].clone()
    number = LETTERS.index("K")
    known[number, 5] = False  # CG
    _, there = truth.torsions(RESIDUE, atoms, known)
    assert there[number].tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert truth.groups(RESIDUE, atoms, known).known[number].tolist() == [1, 0, 0, 1, 0, 0, 0, 1]


def test_names_that_fit():
    """A prediction with half a turn of some side chains: they, and no others, are renamed."""
    _, angles, atoms = built(3)
    swap = tables().renamed[RESIDUE]
    turned = torch.arange(len(RESIDUE)) < len(LETTERS)
    other = atoms.gather(-2, swap[..., None].expand_as(atoms))
    predicted = torch.where(turned[:, None, None], other, atoms)
    predicted = predicted + torch.randn(atoms.shape, generator=torch.Generator().manual_seed(0)) * 0.05
    found = truth.named(RESIDUE, atoms, tables().there[RESIDUE], predicted)
    moves = (swap != torch.arange(14)).any(-1)
    assert torch.equal(found.renamed, turned & moves)
    assert sorted({LETTERS[n] for n in RESIDUE[moves]}) == ["D", "E", "F", "Y"]
    torch.testing.assert_close(found.atoms, torch.where(found.renamed[:, None, None], other, atoms))
    half = angles.clone()[None, None]
    half[..., 3:, :] *= torch.where(tables().alike[RESIDUE], -1.0, 1.0)[..., None]
    ones = torch.ones(1, len(RESIDUE))
    loss = torsion_loss(half, half, angles[None, :, 3:], RESIDUE[None], tables().has_chi[RESIDUE][None], ones)
    assert float(loss) < 1e-6
