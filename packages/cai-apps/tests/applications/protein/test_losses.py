"""Losses beside OpenFold's, whose values are kept in a file; FAPE sees no motion of the whole, and sees a mirror."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_alphafold import RESIDUES, drawn_frames, loss_inputs

from cai_apps.applications.protein.loss import heads, points, torsions
from cai_apps.applications.protein.model.frames import Frames, from_points

ALPHA = 1


@pytest.fixture(scope="module")
def kept() -> dict[str, torch.Tensor]:
    values = load_file(Path(__file__).with_name("openfold.safetensors"))
    return {name.removeprefix("loss."): value for name, value in values.items() if name.startswith("loss.")}


def test_values_are_those_of_openfold(kept):
    given, there = loss_inputs(), kept["there"]
    frames, true = (drawn_frames(RESIDUES, seed) for seed in (1, 2))
    mask, pairs, seen = given["mask"], given["pairs"], given["seen"] * there
    angles = given["raw"] / given["raw"].norm(dim=-1, keepdim=True)
    alpha, true_alpha, alpha_seen = (
        given["atoms"][:, :, ALPHA],
        given["true_atoms"][:, :, ALPHA],
        seen[:, :, ALPHA],
    )
    found = {
        "fape": points.fape(frames, given["x"], true, given["true_x"], mask, given["x_mask"]),
        "backbone": points.backbone(frames, true, mask, torch.tensor([0.9])),
        "torsions": torsions.torsions(
            angles, given["raw"], given["chi"], given["residue"], given["chi_mask"], mask
        ),
        "distogram": heads.distogram(pairs, given["beta"], mask),
        "masked_residues": heads.masked_residues(given["rows"], given["true_rows"], given["masked"]),
        "resolved": heads.resolved(given["atom_scores"], seen, there),
        "plddt": heads.plddt(given["confidence"], alpha, true_alpha, alpha_seen),
        "lddt": points.lddt(alpha, true_alpha, alpha_seen),
        "aligned_errors": heads.aligned_errors(pairs, frames, true, mask),
        "predicted_tm": heads.predicted_tm(pairs, mask),
        "predicted_errors": heads.predicted_errors(pairs),
        "confidence": heads.confidence(given["confidence"]),
    }
    assert {*found, "there"} == set(kept)
    for name, value in found.items():
        # a mean of OpenFold's over torsions divides by 1e-4 more than their number
        bound = 1e-5 if name == "torsions" else 1e-6
        torch.testing.assert_close(value, kept[name].view_as(value), rtol=bound, atol=1e-6, msg=name)


def moved(frames: Frames, motion: Frames) -> Frames:
    return motion.then(frames)


def test_fape_sees_a_mirror_and_no_motion():
    corners = torch.randn(3, 1, 12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 4
    true, x = from_points(*corners), corners[0]
    mask = torch.ones(1, 12)
    motion = drawn_frames(1, 5)
    motion = Frames(motion.rotation.double(), motion.origin.double())
    same = points.fape(moved(true, motion), motion.apply(x), true, x, mask, mask)
    torch.testing.assert_close(
        same, torch.tensor([1e-3], dtype=torch.float64), rtol=1e-3, atol=0
    )  # what the root adds
    mirror = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    other = points.fape(from_points(*(corners * mirror)), x * mirror, true, x, mask, mask)
    assert float(other) > 0.1


def test_what_a_mask_leaves_out_changes_nothing():
    frames, true = (drawn_frames(RESIDUES, seed) for seed in (1, 2))
    mask = torch.ones(1, RESIDUES)
    mask[:, -3:] = 0
    other = Frames(frames.rotation.clone(), frames.origin.clone())
    other.origin[:, -3:] += 100
    args = (true, mask, torch.ones(1))
    torch.testing.assert_close(points.backbone(frames, *args), points.backbone(other, *args))
    nothing = points.backbone(frames, true, torch.zeros(1, RESIDUES), torch.ones(1))
    assert float(nothing) == 0
