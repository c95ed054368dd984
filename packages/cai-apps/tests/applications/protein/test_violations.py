"""Violations beside OpenFold's values, and by structures of which it is known what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_alphafold import crowded, drawn_frames, helix

from cai_apps.applications.protein.bonds import bounds, distances
from cai_apps.applications.protein.chemistry import LETTERS, UNKNOWN, residues
from cai_apps.applications.protein.data.chains import directory_of
from cai_apps.applications.protein.data.structures import read_chain
from cai_apps.applications.protein.loss import violations as module
from cai_apps.applications.protein.loss.violations import violations
from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_apps.applications.protein.model.frames import Frames

OPENFOLD = (-0.4473, 0.014)
"""What OpenFold holds the cosine of CA-C-N to: its deviation is that of a bond's length."""


@pytest.fixture(scope="module")
def kept() -> dict[str, torch.Tensor]:
    values = load_file(Path(__file__).with_name("openfold.safetensors"))
    start = "violations."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def test_values_are_those_of_openfold(kept, monkeypatch):
    monkeypatch.setattr(module, "COSINE_AT_C", OPENFOLD)
    residue, index, atoms = crowded()
    atoms.requires_grad_()
    found = violations(residue, index, atoms)
    for name in ("bonds", "angles_c", "angles_n", "loss"):
        value = getattr(found, name).float()
        torch.testing.assert_close(value, kept[name].view_as(value), rtol=1e-6, atol=1e-7, msg=name)
    (gradient,) = torch.autograd.grad(found.loss.sum(), atoms)
    torch.testing.assert_close(gradient.float(), kept["gradient"], rtol=1e-4, atol=1e-6)


def test_bounds_are_those_of_openfold(kept):
    held = bounds()
    torch.testing.assert_close(held.lower.float(), kept["lower"], rtol=1e-6, atol=1e-6)
    upper = torch.where(kept["upper"] > 1e9, torch.inf, kept["upper"])
    torch.testing.assert_close(held.upper.float(), upper, rtol=1e-6, atol=1e-6)


def test_ideal_residues_keep_their_bounds():
    """The places of atoms in their groups agree with bonds of another table, within the deviations."""
    for residue in residues():
        for (first, second), (length, deviation) in distances(residue).items():
            (one, at), (other, there) = residue.atoms[first], residue.atoms[second]
            if one == other:
                apart = sum((a - b) ** 2 for a, b in zip(at, there, strict=True)) ** 0.5
                assert abs(apart - length) < 4 * deviation, (residue.name, first, second)


def folded(count: int = 12):
    residue, frames, angles = helix(count)
    return residue, torch.arange(count)[None], atoms_of(groups_of(frames, angles, residue), residue)


def real(name: str = "1A7G"):
    """A structure of a crystal, of which all atoms are known."""
    chain = read_chain(directory_of("shipped") / f"{name}.cif")
    residue = torch.from_numpy(chain.residue)[None]
    return residue, torch.arange(residue.shape[1])[None], torch.from_numpy(chain.atoms)[None]


def test_a_crystal_violates_nothing_and_no_motion_changes_that():
    residue, index, atoms = real()
    found = violations(residue, index, atoms)
    assert float(found.loss) == 0
    assert not bool(found.residues.any())
    motion = drawn_frames(1, 5)
    moved = Frames(motion.rotation.double(), motion.origin.double())[:, 0:1, None].apply(atoms)
    torch.testing.assert_close(violations(residue, index, moved).loss, found.loss, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("what", ["bonds", "angles_c", "angles_n", "clashes"])
def test_what_is_put_in_is_found_where_it_is(what):
    residue, index, atoms = real()
    before = violations(residue, index, atoms)
    atoms = atoms.clone()
    at = 30
    if what == "bonds":
        atoms[:, at:] += 99.0  # the rest of the chain goes away
    elif what == "angles_c":
        carbon, nitrogen = atoms[:, at - 1, 2], atoms[:, at, 0]
        toward = atoms[:, at - 1, 1] - carbon  # the nitrogen goes toward the alpha carbon
        atoms[:, at, 0] = carbon + (toward / toward.norm()) * (nitrogen - carbon).norm()
    elif what == "angles_n":
        nitrogen = atoms[:, at, 0]
        toward = atoms[:, at - 1, 2] - nitrogen
        alpha = atoms[:, at, 1]
        atoms[:, at, 1] = nitrogen + (toward / toward.norm()) * (alpha - nitrogen).norm()
    else:
        atoms[:, at + 20] += atoms[:, at, 1:2] - atoms[:, at + 20, 1:2]  # one residue lies in another
    after = violations(residue, index, atoms)
    assert float(getattr(after, what)) > float(getattr(before, what)) + 1e-3
    assert bool(after.residues[0, at])
    assert not bool(after.residues[0, :5].any()), "residues are told of that have nothing to do with it"


def test_residues_that_are_not_there_and_gaps_count_nothing():
    residue, index, atoms = folded()
    before = violations(residue, index, atoms)
    padded = torch.cat([residue, torch.full((1, 3), UNKNOWN)], 1)
    longer = torch.cat([atoms, torch.zeros(1, 3, 14, 3, dtype=atoms.dtype)], 1)
    after = violations(padded, torch.arange(15)[None], longer)
    torch.testing.assert_close(after.loss, before.loss)
    assert not bool(after.residues[0, 12:].any())
    gap = index.clone()
    gap[:, 6:] += 4
    apart = atoms.clone()
    apart[:, 6:] += 50.0
    assert float(violations(residue, gap, apart).bonds) <= float(before.bonds) + 1e-6
    assert float(violations(residue, index, apart).bonds) > 1.0


@pytest.mark.parametrize(("about", "clashes"), [("SG", False), ("CB", True)])
def test_a_bridge_of_sulfurs_is_no_clash(about, clashes):
    """Two cysteines of which one is the other turned about a point near an atom."""
    cysteine = residues()[LETTERS.index("C")]
    place = list(cysteine.atoms).index(about)
    assert list(cysteine.atoms)[module.SULFUR] == "SG"
    residue, _, atoms = real("1A8O")
    one = atoms[:, residue[0] == LETTERS.index("C")][:, :1]
    alpha, near = one[:, :, 1:2], one[:, :, place : place + 1]
    center = near + 0.8 * (near - alpha) / (near - alpha).norm()  # 1.6 angstroms between the two
    pair = torch.cat([one, 2 * center - one], 1)
    found = violations(torch.full((1, 2), LETTERS.index("C")), torch.tensor([[0, 10]]), pair)
    assert (float(found.clashes) > 0) == clashes
