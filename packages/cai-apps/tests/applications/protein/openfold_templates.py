"""Writes openfold_templates.safetensors: features of the templates of `small_templates`, as OpenFold computes them.

    PYTHONPATH=path/to/openfold:packages/cai-apps/tests python openfold_templates.py

What is 0 or 1 is kept in bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from small_templates import RESIDUES, given

from cai_apps.applications.protein.chemistry import ATOMS, GAP, tables


def batch() -> dict[str, torch.Tensor]:
    """OpenFold's names, atoms at their places among 37, in float64."""
    templates = given()
    shape = (len(templates), RESIDUES)
    residue = torch.full(shape, GAP)
    atoms = torch.zeros(*shape, len(ATOMS), 3, dtype=torch.float64)
    known = torch.zeros(*shape, len(ATOMS), dtype=torch.float64)
    for number, template in enumerate(templates):
        for here, there in enumerate(template.place):
            if there < 0:
                continue
            residue[number, here] = int(template.chain.residue[there])
            for place, kind in enumerate(tables().kind[residue[number, here]]):
                if template.chain.known[there, place]:
                    atoms[number, here, kind] = torch.tensor(template.chain.atoms[there, place])
                    known[number, here, kind] = 1
    return {
        "template_aatype": residue, "template_all_atom_positions": atoms, "template_all_atom_mask": known,
    }  # fmt: skip


def main() -> None:
    from openfold.data import data_transforms
    from openfold.utils import feats

    found = data_transforms.make_pseudo_beta("template_")(batch())
    found = data_transforms.atom37_to_torsion_angles("template_")(found)
    bins = {"min_bin": 3.25, "max_bin": 50.75, "no_bins": 39}
    plain = feats.build_template_pair_feat(found, use_unit_vector=False, **bins)
    vectors = feats.build_template_pair_feat(found, use_unit_vector=True, **bins)[..., 84:87]
    assert ((plain == 0) | (plain == 1)).all()
    values = {
        "pair": plain.to(torch.uint8), "vectors": vectors.float(),
        "angles": feats.build_template_angle_feat(found).float(),
        "known": found["template_torsion_angles_mask"][..., 2].to(torch.uint8),
    }  # fmt: skip
    kept = {name: value.contiguous() for name, value in values.items()}
    save_file(kept, Path(__file__).with_name("openfold_templates.safetensors"))


if __name__ == "__main__":
    main()
