"""Writes what OpenFold computes with the weights and the input of `small_alphafold`, for the tests to compare with.

    PYTHONPATH=path/to/openfold:packages/cai-apps/tests python openfold_values.py

OpenFold is not a part of this repository; its plain PyTorch code is run, and what it returns is kept. Where its code
calls kernels that a CPU lacks, the same is written out here. It masks extra sequences in their transitions, which
changes nothing that is read later, and computes with rotations in float32.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_alphafold import RESIDUES, TEMPLATES, crowded, drawn_frames, features, loss_inputs, model, raw
from torch import Tensor

from cai_apps.applications.protein import names


def attention(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v


def softmax_(scores: Tensor, rows: int, columns: int) -> None:
    scores.copy_(scores.softmax(-1))


def openfold():
    """OpenFold's model with the sizes of ours, and its weights by our names."""
    kernels = types.ModuleType("attn_core_inplace_cuda")
    kernels.forward_ = softmax_  # type: ignore[attr-defined]
    sys.modules["attn_core_inplace_cuda"] = kernels
    import openfold.model.primitives as primitives
    from openfold.config import model_config
    from openfold.model.model import AlphaFold

    primitives.attention_core = attention
    config = model_config("model_1_ptm", train=True)
    stacks = config.model.evoformer_stack, config.model.extra_msa.extra_msa_stack
    for stack in stacks:
        stack.no_blocks = 1
    config.model.structure_module.no_blocks = 2
    stacks[0].blocks_per_ckpt = config.model.template.template_pair_stack.blocks_per_ckpt = None
    stacks[1].ckpt = False
    theirs, ours = AlphaFold(config).eval(), model()
    theirs_by_name = dict(theirs.named_parameters())
    table = names.alphafold(1, 1, 2)
    with torch.no_grad():
        for name, param in ours.named_parameters():
            theirs_by_name.pop(names.parameter(name, table)).copy_(param)
    assert not theirs_by_name, sorted(theirs_by_name)
    return theirs


def rounds() -> dict[str, Tensor]:
    """OpenFold's names for our features, the rounds along the last dim."""
    from openfold.np import residue_constants

    found = []
    for seed in (1, 2):
        ours = features(seed)
        residue = ours.residue
        shape = (1, TEMPLATES, RESIDUES)
        found.append({
            "aatype": residue, "target_feat": ours.target, "residue_index": ours.index, "msa_feat": ours.alignment,
            "seq_mask": ours.mask, "msa_mask": ours.alignment_mask, "extra_msa_mask": ours.extra_mask,
            "template_mask": ours.templates.there, "template_aatype": torch.zeros(shape, dtype=torch.int64),
            "atom37_atom_exists": torch.tensor(residue_constants.RESTYPE_ATOM37_MASK)[residue].float(),
            "residx_atom37_to_atom14": torch.tensor(residue_constants.RESTYPE_ATOM37_TO_ATOM14)[residue].long(),
            "extra": ours.extra, "template_pair": ours.templates.pair, "template_angles": ours.templates.angles,
            "template_torsion_angles_mask": ours.templates.known[..., None].expand(*shape, 7),
        })  # fmt: skip
    return {name: torch.stack([each[name] for each in found], -1) for name in found[0]}


def losses() -> dict[str, Tensor]:
    """Of `loss_inputs`, by the names of our functions."""
    from openfold.utils import loss
    from openfold.utils.rigid_utils import Rigid, Rotation

    given, ones = loss_inputs(), torch.ones(1)
    frames, true = (drawn_frames(RESIDUES, seed) for seed in (1, 2))
    theirs, theirs_true = (Rigid(Rotation(rot_mats=f.rotation), f.origin) for f in (frames, true))
    square, square_true = (each.to_tensor_4x4() for each in (theirs, theirs_true))
    there = torch.tensor(loss.residue_constants.RESTYPE_ATOM37_MASK)[given["residue"]].float()
    seen, mask, pairs = given["seen"] * there, given["mask"], given["pairs"]
    angles = given["raw"] / given["raw"].norm(dim=-1, keepdim=True)
    return {
        "fape": loss.compute_fape(
            theirs, theirs_true, mask, given["x"], given["true_x"], given["x_mask"], 10.0, None, 10.0, 1e-4
        ),
        "backbone": loss.backbone_loss(square_true, mask, square[None], use_clamped_fape=torch.tensor(0.9)),
        "torsions": loss.supervised_chi_loss(
            angles, given["raw"], given["residue"], mask, given["chi_mask"], given["chi"], 0.5, 0.01, eps=1e-8
        ),
        "distogram": loss.distogram_loss(pairs, given["beta"], mask),
        "masked_residues": loss.masked_msa_loss(given["rows"], given["true_rows"], given["masked"], 23),
        "resolved": loss.experimentally_resolved_loss(given["atom_scores"], there, seen, ones, 0.1, 3.0),
        "plddt": loss.lddt_loss(given["confidence"], given["atoms"], given["true_atoms"], seen, ones),
        "lddt": loss.lddt_ca(given["atoms"], given["true_atoms"], seen),
        "aligned_errors": loss.tm_loss(pairs, square, square_true, mask, ones),
        "predicted_tm": loss.compute_tm(pairs[0], residue_weights=mask[0]),
        "predicted_errors": loss.compute_predicted_aligned_error(pairs)["predicted_aligned_error"],
        "confidence": loss.compute_plddt(given["confidence"]),
        "there": there,
    }


def violations() -> dict[str, Tensor]:
    """Of `crowded`, in float64, and their gradient. Its table of bonds is to be put into openfold/resources."""
    from openfold.np import residue_constants
    from openfold.utils import loss

    residue, index, atoms = crowded()
    atoms.requires_grad_()
    there = torch.tensor(residue_constants.RESTYPE_ATOM14_MASK)[residue].double()
    batch = {
        "atom14_atom_exists": there, "residue_index": index, "aatype": residue,
        "residx_atom14_to_atom37": torch.tensor(residue_constants.RESTYPE_ATOM14_TO_ATOM37)[residue].long(),
    }  # fmt: skip
    found = loss.find_structural_violations(batch, atoms, 12.0, 1.5)
    between = found["between_residues"]
    whole = loss.violation_loss(found, there)
    (gradient,) = torch.autograd.grad(whole, atoms)
    bounds = residue_constants.make_atom14_dists_bounds(1.5, 12.0)
    return {
        "bonds": between["bonds_c_n_loss_mean"], "angles_c": between["angles_ca_c_n_loss_mean"],
        "angles_n": between["angles_c_n_ca_loss_mean"], "loss": whole, "gradient": gradient,
        "lower": torch.tensor(bounds["lower_bound"]), "upper": torch.tensor(bounds["upper_bound"]),
    }  # fmt: skip


def main() -> None:
    theirs = openfold()
    import openfold.model.embedders as embedders
    import openfold.model.model as whole

    # features come ready here: they are what OpenFold would make of others
    embedders.build_template_pair_feat = lambda batch, **_: batch["template_pair"]
    embedders.build_template_angle_feat = lambda batch: batch["template_angles"]
    whole.build_extra_msa_feat = lambda batch: batch["extra"]
    out = theirs(rounds())
    mask = raw(2)["alignment_mask"].float()[..., None]
    values = {
        "m": out["msa"] * mask, "z": out["pair"], "s": out["single"], "atoms": out["sm"]["positions"][-1],
        "plddt": out["lddt_logits"], "distances": out["distogram_logits"], "residues": out["masked_msa_logits"] * mask,
        "resolved": out["experimentally_resolved_logits"], "errors": out["tm_logits"],
    }  # fmt: skip
    sum(value.square().mean() for value in values.values()).backward()
    table, by_name = names.alphafold(1, 1, 2), dict(theirs.named_parameters())
    for name, _ in model().named_parameters():
        grad = by_name[names.parameter(name, table)].grad
        values[f"gradient.{name}"] = torch.stack([grad.norm(), grad.flatten()[0], grad.flatten()[-1]])
    values |= {f"loss.{name}": torch.as_tensor(value) for name, value in losses().items()}
    values |= {f"violations.{name}": value for name, value in violations().items()}
    kept = {name: value.detach().float().contiguous() for name, value in values.items()}
    save_file(kept, Path(__file__).with_name("openfold.safetensors"))


if __name__ == "__main__":
    main()
