"""What OpenFold calls the parameters of the model: a table of modules, ours and theirs."""

from __future__ import annotations


def _attention(module: str, openfold_module: str) -> dict[str, str]:
    names = {
        "to_q": "linear_q",
        "to_k": "linear_k",
        "to_v": "linear_v",
        "gate": "linear_g",
        "out": "linear_o",
    }
    return {
        f"{module}.{child}": f"{openfold_module}.{openfold_child}" for child, openfold_child in names.items()
    }


def _transition(module: str, openfold_module: str) -> dict[str, str]:
    names = {"norm": "layer_norm", "wide": "linear_1", "out": "linear_2"}
    return {
        f"{module}.{child}": f"{openfold_module}.{openfold_child}" for child, openfold_child in names.items()
    }


def _triangles(module: str, openfold_module: str) -> dict[str, str]:
    names = {
        "norm": "layer_norm_in", "left": "linear_a_p", "left_gate": "linear_a_g", "right": "linear_b_p",
        "right_gate": "linear_b_g", "norm_out": "layer_norm_out", "out": "linear_z", "gate": "linear_g",
    }  # fmt: skip
    return {
        f"{module}.{child}": f"{openfold_module}.{openfold_child}" for child, openfold_child in names.items()
    }


def _triangle_attention(module: str, openfold_module: str) -> dict[str, str]:
    names = {f"{module}.norm": f"{openfold_module}.layer_norm", f"{module}.bias": f"{openfold_module}.linear"}
    return names | _attention(f"{module}.attention", f"{openfold_module}.mha")


def pair_updates(module: str, openfold_module: str) -> dict[str, str]:
    """Modules of `PairUpdates`."""
    return (
        _triangles(f"{module}.outgoing", f"{openfold_module}.tri_mul_out")
        | _triangles(f"{module}.incoming", f"{openfold_module}.tri_mul_in")
        | _triangle_attention(f"{module}.starting", f"{openfold_module}.tri_att_start")
        | _triangle_attention(f"{module}.ending", f"{openfold_module}.tri_att_end")
        | _transition(f"{module}.transition", f"{openfold_module}.pair_transition")
    )


def block(*, one_query: bool) -> dict[str, str]:
    """Modules of `EvoformerBlock`."""
    column = "msa_att_col" if one_query else "msa_att_col._msa_att"
    names = {
        "row.norm": "msa_att_row.layer_norm_m",
        "row.norm_pair": "msa_att_row.layer_norm_z",
        "row.bias": "msa_att_row.linear_z",
        "column.norm": f"{column}.layer_norm_m",
        "outer.norm": "outer_product_mean.layer_norm",
        "outer.left": "outer_product_mean.linear_1",
        "outer.right": "outer_product_mean.linear_2",
        "outer.out": "outer_product_mean.linear_out",
    }
    return (
        names
        | _attention("row.attention", "msa_att_row.mha")
        | _attention("column.attention", f"{column}.{'global_attention' if one_query else 'mha'}")
        | _transition("transition", "msa_transition")
        | pair_updates("pair", "pair_stack")
    )


def structure() -> dict[str, str]:
    """Modules of `StructureModule`."""
    names = {
        "norm": "layer_norm_s",
        "norm_pair": "layer_norm_z",
        "first": "linear_in",
        "attention": "ipa",
        "attention.to_q": "ipa.linear_q",
        "attention.to_kv": "ipa.linear_kv",
        "attention.q_points": "ipa.linear_q_points.linear",
        "attention.kv_points": "ipa.linear_kv_points.linear",
        "attention.bias": "ipa.linear_b",
        "attention.out": "ipa.linear_out",
        "norm_attention": "layer_norm_ipa",
        "transition.first": "transition.layers.0.linear_1",
        "transition.second": "transition.layers.0.linear_2",
        "transition.third": "transition.layers.0.linear_3",
        "transition.norm": "transition.layer_norm",
        "move": "bb_update.linear",
        "angles.now": "angle_resnet.linear_in",
        "angles.start": "angle_resnet.linear_initial",
        "angles.out": "angle_resnet.linear_out",
    }
    for block in range(2):
        module, openfold_module = f"angles.blocks.{block}", f"angle_resnet.layers.{block}"
        names |= {
            f"{module}.first": f"{openfold_module}.linear_1",
            f"{module}.second": f"{openfold_module}.linear_2",
        }
    return names


def input_embedder() -> dict[str, str]:
    """Modules of `InputEmbedder`."""
    return {
        "left": "linear_tf_z_i",
        "right": "linear_tf_z_j",
        "target": "linear_tf_m",
        "alignment": "linear_msa_m",
        "position": "linear_relpos",
    }


def recycling_embedder() -> dict[str, str]:
    """Modules of `RecyclingEmbedder`."""
    return {"norm": "layer_norm_m", "norm_pair": "layer_norm_z", "distance": "linear"}


def template_embedder(blocks: int) -> dict[str, str]:
    """Modules of `TemplateEmbedder`."""
    names = {
        "angles": "template_single_embedder.linear_1",
        "angles_out": "template_single_embedder.linear_2",
        "pair": "template_pair_embedder.linear",
        "norm": "template_pair_stack.layer_norm",
        "attention.to_q": "template_pointwise_att.mha.linear_q",
        "attention.to_k": "template_pointwise_att.mha.linear_k",
        "attention.to_v": "template_pointwise_att.mha.linear_v",
        "attention.out": "template_pointwise_att.mha.linear_o",
    }
    for block in range(blocks):
        names |= pair_updates(f"blocks.{block}", f"template_pair_stack.blocks.{block}")
    return names


def alphafold(blocks: int, extra_blocks: int, template_blocks: int) -> dict[str, str]:
    """Modules of `AlphaFold` that has all of its parts."""
    names = {
        "extra": "extra_msa_embedder.linear",
        "evoformer.single": "evoformer.linear",
        "heads.plddt.norm": "aux_heads.plddt.layer_norm",
        "heads.plddt.first": "aux_heads.plddt.linear_1",
        "heads.plddt.second": "aux_heads.plddt.linear_2",
        "heads.plddt.out": "aux_heads.plddt.linear_3",
        "heads.distances": "aux_heads.distogram.linear",
        "heads.residues": "aux_heads.masked_msa.linear",
        "heads.resolved": "aux_heads.experimentally_resolved.linear",
        "heads.errors": "aux_heads.tm.linear",
    }
    parts = {
        ("input", "input_embedder"): input_embedder(),
        ("recycling", "recycling_embedder"): recycling_embedder(),
        ("template", "template_embedder"): template_embedder(template_blocks),
        ("structure", "structure_module"): structure(),
    }
    stacks = (("extra_stack", "extra_msa_stack", extra_blocks), ("evoformer", "evoformer", blocks))
    for module, openfold_module, count in stacks:
        for number in range(count):
            key = (f"{module}.blocks.{number}", f"{openfold_module}.blocks.{number}")
            parts[key] = block(one_query=module == "extra_stack")
    for (module, openfold_module), table in parts.items():
        names |= {
            f"{module}.{child}": f"{openfold_module}.{openfold_child}"
            for child, openfold_child in table.items()
        }
    return names


def parameter(name: str, table: dict[str, str]) -> str:
    """OpenFold's name of one of our parameters, by a table of modules."""
    module, _, leaf = name.rpartition(".")
    if name.endswith("structure.attention.weight"):
        return f"{table['structure.attention']}.head_weights"
    return f"{table[module]}.{leaf}"
