"""The truth has no error but what the root adds, in any names and wherever it lies; a small model learns a helix."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from small_alphafold import SMALL, drawn_frames, helix

from cai_apps.applications.protein.chemistry import tables
from cai_apps.applications.protein.data import truth as known_structure
from cai_apps.applications.protein.data.clusters import target_features
from cai_apps.applications.protein.loss.points import lddt
from cai_apps.applications.protein.loss.whole import WEIGHTS, Truth, losses, total
from cai_apps.applications.protein.model.alphafold import ALPHA, AlphaFold, Features, Round
from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_apps.applications.protein.model.frames import Frames
from cai_apps.applications.protein.model.heads import Said
from cai_apps.applications.protein.model.structure import Folded, Placed


def folded(frames: Frames, groups: Frames, atoms: torch.Tensor, angles: torch.Tensor) -> Folded:
    """As two blocks say it, alike."""
    return Folded(torch.zeros(1), [Placed(frames, angles, angles)] * 2, groups, atoms)


def truth_of(residue: torch.Tensor, frames: Frames, angles: torch.Tensor) -> tuple[Truth, Folded]:
    groups = groups_of(frames, angles, residue)
    atoms, known = atoms_of(groups, residue), tables().there[residue]
    found, there = known_structure.torsions(residue, atoms, known)
    ones = torch.ones(1, dtype=torch.float64)
    rows = residue[:, None].repeat(1, 3, 1)
    truth = Truth(
        residue, torch.ones(residue.shape, dtype=torch.float64), atoms, known, found, there,
        known_structure.groups(residue, atoms, known), rows, torch.ones(rows.shape), ones, ones,
        torch.arange(residue.shape[1])[None],
    )  # fmt: skip
    return truth, folded(frames, groups, atoms, angles)


def said(count: int) -> Said:
    pairs = torch.zeros(1, count, count, 64)
    rows = torch.zeros(1, 3, count, 23)
    return Said(torch.zeros(1, count, 50), pairs, rows, torch.zeros(1, count, 37), pairs)


def test_the_truth_has_no_error():
    residue, frames, angles = helix(20)
    truth, own = truth_of(residue, frames, angles)
    motion = drawn_frames(1, 4)
    motion = Frames(motion.rotation.double(), motion.origin.double())
    moved = motion.then(frames)
    alike = torch.where(tables().alike[residue], -1.0, 1.0)
    half = angles.clone()
    half[..., 3:, :] *= alike[..., None]  # atoms that look alike change their places
    groups = groups_of(moved, half, residue)
    other = folded(moved, groups, atoms_of(groups, residue), half)
    for each in (own, other):
        blank = torch.zeros(1)
        found = losses(Round(blank, blank, blank, each, said(20)), truth)
        assert float(found["backbone"]) < 2e-3
        assert float(found["side chains"]) < 2e-3
        assert float(found["torsions"]) < 1e-5
        assert abs(float(found["plddt"]) - math.log(50)) < 1e-4
        assert abs(float(found["masked residues"]) - math.log(23)) < 1e-4
        assert abs(float(found["resolved"]) - math.log(2)) < 1e-4
    mirror = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    wrong = replace(own, atoms=own.atoms * mirror)
    assert float(losses(Round(blank, blank, blank, wrong, said(20)), truth)["side chains"]) > 0.1
    weighed = total({name: torch.ones(1) for name in (*WEIGHTS, "resolved")})
    assert abs(float(weighed) - sum(WEIGHTS.values())) < 1e-5


def test_a_small_model_learns_a_helix():
    torch.manual_seed(0)
    residue, frames, angles = helix(12)
    truth, _ = truth_of(residue, frames, angles)
    model = AlphaFold(SMALL)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ones, random = torch.ones(1, 12), torch.Generator().manual_seed(1)
    given = Features(
        residue, ones, torch.arange(12)[None], target_features(residue[0])[None],
        torch.randn(1, 3, 12, 49, generator=random), torch.ones(1, 3, 12),
        torch.randn(1, 2, 12, 25, generator=random), torch.ones(1, 2, 12),
    )  # fmt: skip
    seen = []
    for _ in range(60):
        found = model([given])
        loss = total(losses(found, truth)).mean()
        seen.append(float(loss.detach()))
        loss.backward()
        assert all(param.grad is None or param.grad.isfinite().all() for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert seen[-1] < 0.5 * seen[0]
    met = lddt(found.folded.atoms[:, :, ALPHA].double(), truth.atoms[:, :, ALPHA], truth.known[:, :, ALPHA])
    assert float(met.mean()) > 0.3
