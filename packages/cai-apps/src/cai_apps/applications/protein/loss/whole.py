"""The loss of a round: what it says of a known structure, and of residues that were masked (section 1.9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cai_apps.applications.protein.chemistry import ATOMS, LETTERS, tables
from cai_apps.applications.protein.data import truth as known_structure
from cai_apps.applications.protein.data.truth import Groups
from cai_apps.applications.protein.loss import heads, points
from cai_apps.applications.protein.loss.torsions import torsions
from cai_apps.applications.protein.loss.violations import violations
from cai_apps.applications.protein.model.alphafold import ALPHA, BETA, Round
from cai_apps.applications.protein.model.frames import Frames
from cai_apps.applications.protein.model.structure import Placed

WEIGHTS = {
    "backbone": 0.5, "side chains": 0.5, "torsions": 1.0, "distances": 0.3, "masked residues": 2.0, "plddt": 0.01,
}  # fmt: skip
"""Weights of the losses in the first training (section 1.9.1)."""
FINE_TUNING = WEIGHTS | {"violations": 1.0, "resolved": 0.01, "aligned errors": 0.1}
"""Weights of the losses in fine-tuning, the training after that."""


@dataclass(frozen=True)
class Truth:
    """A known structure and the alignment before it was masked.

    Args:
        residue: numbers [B, R]; mask: [B, R].
        atoms, known: positions at their 14 places, angstroms, and which are known [B, R, 14, 3], [B, R, 14].
        torsions, torsions_known: the result of `data.truth.torsions` [B, R, 7, 2], [B, R, 7].
        groups: the result of `data.truth.groups` [B, R, 8].
        rows, masked: numbers of the alignment's residues, and which were masked [B, S, R].
        clamped: 1 where errors of the backbone have a most, else 0 [B].
        fine: 1 where the resolution is good enough to learn confidence from, else 0 [B].
        index: places of the residues in the chain [B, R].
    """

    residue: Tensor
    mask: Tensor
    atoms: Tensor
    known: Tensor
    torsions: Tensor
    torsions_known: Tensor
    groups: Groups
    rows: Tensor
    masked: Tensor
    clamped: Tensor
    fine: Tensor
    index: Tensor


def losses(prediction: Round, truth: Truth, *, bonds: bool = False) -> dict[str, Tensor]:
    """Each by its name, [B], before its weight; "resolved" and "aligned errors" too, which have none at first.

    Args:
        bonds: also "violations", for which all atoms are compared with each other.
    """
    scores, folded = prediction.scores, prediction.folded
    backbone_known = truth.groups.known[..., 0]
    backbone = truth.groups.frames[..., 0]
    alpha, alpha_known = truth.atoms[:, :, ALPHA], truth.known[:, :, ALPHA]
    beta, beta_known = _beta(truth.residue, truth.atoms, truth.known)
    angles, raw = (
        torch.stack([getattr(block, name) for block in folded.blocks]) for name in ("angles", "raw_angles")
    )
    observed_atoms, kind_mask = _kinds(truth.residue, truth.known)
    loss_by_name = {
        "backbone": _backbones(folded.blocks, backbone, backbone_known, truth.clamped),
        "side chains": _side_chains(folded.groups, folded.atoms, truth),
        "torsions": torsions(
            angles, raw, truth.torsions[..., 3:, :], truth.residue, truth.torsions_known[..., 3:], truth.mask
        ),
        "distances": heads.distogram(scores.distances, beta, beta_known),
        "masked residues": heads.masked_residues(scores.residues, truth.rows, truth.masked),
        "plddt": truth.fine * heads.plddt(scores.plddt, folded.atoms[:, :, ALPHA], alpha, alpha_known),
        "resolved": truth.fine * heads.resolved(scores.resolved, observed_atoms, kind_mask),
    }
    if bonds:
        loss_by_name["violations"] = violations(truth.residue, truth.index, folded.atoms).loss
    if scores.errors is not None:
        aligned_errors = heads.aligned_errors(
            scores.errors, folded.blocks[-1].frames, backbone, backbone_known
        )
        loss_by_name["aligned errors"] = truth.fine * aligned_errors
    return loss_by_name


def total(loss_by_name: dict[str, Tensor], weights: dict[str, float] | None = None) -> Tensor:
    """The weighted sum of losses, [B]; those without a weight count nothing."""
    weights = WEIGHTS if weights is None else weights
    return sum(
        (weights[name] * value for name, value in loss_by_name.items() if weights.get(name)), torch.zeros(())
    )


def _backbones(blocks: Sequence[Placed], true: Frames, frame_mask: Tensor, clamped: Tensor) -> Tensor:
    """FAPE of the backbone after each block of the structure module, their mean, [B]; all of them at once."""
    count = len(blocks)
    rotation, origin = (
        torch.cat([getattr(block.frames, name) for block in blocks]) for name in ("rotation", "origin")
    )
    true_frames = Frames(true.rotation.repeat(count, 1, 1, 1), true.origin.repeat(count, 1, 1))
    errors = points.backbone(
        Frames(rotation, origin), true_frames, frame_mask.repeat(count, 1), clamped.repeat(count)
    )
    return errors.unflatten(0, (count, -1)).mean(0)


def _side_chains(groups: Frames, atoms: Tensor, truth: Truth) -> Tensor:
    """FAPE of all atoms from all rigid groups, with the names that fit best."""
    named = known_structure.named(truth.residue, truth.atoms, truth.known, atoms)
    swapped = named.renamed[..., None]
    true_frames, renamed_frames = truth.groups.frames, truth.groups.other
    rotation = torch.where(swapped[..., None, None], renamed_frames.rotation, true_frames.rotation)
    return points.fape(
        Frames(groups.rotation.flatten(1, 2), groups.origin.flatten(1, 2)),
        atoms.flatten(1, 2),
        Frames(rotation.flatten(1, 2), true_frames.origin.flatten(1, 2)),
        named.atoms.flatten(1, 2),
        truth.groups.known.flatten(1, 2),
        named.known.flatten(1, 2),
    )


def _beta(residue: Tensor, atoms: Tensor, atom_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Beta carbons, of glycine the alpha carbon, [B, R, 3], and which are known [B, R]."""
    place = torch.where(residue == LETTERS.index("G"), ALPHA, BETA)[..., None]
    return atoms.gather(-2, place[..., None].expand(*place.shape, 3))[..., 0, :], atom_mask.gather(-1, place)[
        ..., 0
    ]


def _kinds(residue: Tensor, atom_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the 37 kinds of atoms are known, and which a residue has, [B, R, 37]."""
    table = tables(residue.device)
    kind, has_atom = table.kind[residue], table.there[residue]
    blank = torch.zeros(*residue.shape, len(ATOMS), device=residue.device)
    kind_mask = blank.scatter_add(-1, kind, has_atom.float())
    return blank.scatter_add(-1, kind, has_atom.float() * atom_mask.float()), kind_mask
