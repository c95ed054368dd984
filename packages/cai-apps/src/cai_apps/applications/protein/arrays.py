"""Where AlphaFold's published parameters (`params_model_*.npz`) keep those of the model, and how they lie there.

Of each of our parameters: a scope, a name in it, how the array becomes ours, and its place in a stack of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ROOT = "alphafold/alphafold_iteration/"
EVOFORMER = f"{ROOT}evoformer/"
TEMPLATE = f"{EVOFORMER}template_embedding/single_template_embedding/"
FOLD = f"{ROOT}structure_module/fold_iteration/"

Form = Literal["same", "turned", "heads", "joined", "flat"]
"""The array is ours, or turned; [in, N, head] or [., ., out], whose heads are joined and which is turned; a bias
[N, head] that is flat here."""


@dataclass(frozen=True)
class Place:
    """The place of one parameter in a file.

    Args:
        key: the key of the file's array.
        form: the form that it has there.
        at: its place along the first dim, of blocks; None: the array is of this parameter alone.
    """

    key: str
    form: Form
    at: int | None = None


Names = dict[str, tuple[str, Form]]
"""The scope and name in the file, and the form, by the parameter's name in our module."""


def ours_of(array: Tensor, form: Form) -> Tensor:
    """An array as our parameter."""
    if form == "turned":
        return array[:, None] if array.dim() == 1 else array.T
    if form == "heads":
        return array.flatten(1).T
    if form == "joined":
        return array.flatten(0, 1).T
    return array.flatten() if form == "flat" else array


def _linear(module: str, scope: str) -> Names:
    return {f"{module}.weight": (f"{scope}//weights", "turned"), f"{module}.bias": (f"{scope}//bias", "same")}


def _norm(module: str, scope: str) -> Names:
    return {f"{module}.weight": (f"{scope}//scale", "same"), f"{module}.bias": (f"{scope}//offset", "same")}


def _attention(module: str, scope: str, *, gated: bool = True, one_query: bool = False) -> Names:
    shared: Form = "turned" if one_query else "heads"
    names: Names = {
        f"{module}.to_q.weight": (f"{scope}//query_w", "heads"),
        f"{module}.to_k.weight": (f"{scope}//key_w", shared),
        f"{module}.to_v.weight": (f"{scope}//value_w", shared),
        f"{module}.out.weight": (f"{scope}//output_w", "joined"),
        f"{module}.out.bias": (f"{scope}//output_b", "same"),
    }
    if gated:
        names[f"{module}.gate.weight"] = (f"{scope}//gating_w", "heads")
        names[f"{module}.gate.bias"] = (f"{scope}//gating_b", "flat")
    return names


def _transition(module: str, scope: str) -> Names:
    return (
        _norm(f"{module}.norm", f"{scope}/input_layer_norm")
        | _linear(f"{module}.wide", f"{scope}/transition1")
        | _linear(f"{module}.out", f"{scope}/transition2")
    )


def _multiplication(module: str, scope: str, *, outgoing: bool) -> Names:
    """Left and right change places where sides come in."""
    left_side, right_side = ("left", "right") if outgoing else ("right", "left")
    return (
        _norm(f"{module}.norm", f"{scope}/layer_norm_input")
        | _linear(f"{module}.left", f"{scope}/{left_side}_projection")
        | _linear(f"{module}.right", f"{scope}/{right_side}_projection")
        | _linear(f"{module}.left_gate", f"{scope}/{left_side}_gate")
        | _linear(f"{module}.right_gate", f"{scope}/{right_side}_gate")
        | _norm(f"{module}.norm_out", f"{scope}/center_layer_norm")
        | _linear(f"{module}.out", f"{scope}/output_projection")
        | _linear(f"{module}.gate", f"{scope}/gating_linear")
    )


def _triangle_attention(module: str, scope: str) -> Names:
    bias: Names = {f"{module}.bias.weight": (f"{scope}//feat_2d_weights", "turned")}
    return (
        _norm(f"{module}.norm", f"{scope}/query_norm")
        | bias
        | _attention(f"{module}.attention", f"{scope}/attention")
    )


def _pair(module: str, scope: str) -> Names:
    return (
        _multiplication(f"{module}outgoing", f"{scope}triangle_multiplication_outgoing", outgoing=True)
        | _multiplication(f"{module}incoming", f"{scope}triangle_multiplication_incoming", outgoing=False)
        | _triangle_attention(f"{module}starting", f"{scope}triangle_attention_starting_node")
        | _triangle_attention(f"{module}ending", f"{scope}triangle_attention_ending_node")
        | _transition(f"{module}transition", f"{scope}pair_transition")
    )


def _block(scope: str, *, one_query: bool) -> Names:
    row, outer = f"{scope}msa_row_attention_with_pair_bias", f"{scope}outer_product_mean"
    column = f"{scope}msa_column_{'global_' if one_query else ''}attention"
    alone: Names = {
        "row.bias.weight": (f"{row}//feat_2d_weights", "turned"),
        "outer.out.weight": (f"{outer}//output_w", "joined"),
        "outer.out.bias": (f"{outer}//output_b", "same"),
    }
    return (
        alone
        | _norm("row.norm", f"{row}/query_norm")
        | _norm("row.norm_pair", f"{row}/feat_2d_norm")
        | _attention("row.attention", f"{row}/attention")
        | _norm("column.norm", f"{column}/query_norm")
        | _attention("column.attention", f"{column}/attention", one_query=one_query)
        | _transition("transition", f"{scope}msa_transition")
        | _norm("outer.norm", f"{outer}/layer_norm_input")
        | _linear("outer.left", f"{outer}/left_projection")
        | _linear("outer.right", f"{outer}/right_projection")
        | _pair("pair.", scope)
    )


def _structure() -> Names:
    points, side = f"{FOLD}invariant_point_attention", f"{FOLD}rigid_sidechain"
    linears = {
        "structure.first": f"{ROOT}structure_module/initial_projection",
        "structure.attention.to_q": f"{points}/q_scalar",
        "structure.attention.to_kv": f"{points}/kv_scalar",
        "structure.attention.q_points": f"{points}/q_point_local",
        "structure.attention.kv_points": f"{points}/kv_point_local",
        "structure.attention.bias": f"{points}/attention_2d",
        "structure.attention.out": f"{points}/output_projection",
        "structure.transition.first": f"{FOLD}transition",
        "structure.transition.second": f"{FOLD}transition_1",
        "structure.transition.third": f"{FOLD}transition_2",
        "structure.move": f"{FOLD}affine_update",
        "structure.angles.now": f"{side}/input_projection",
        "structure.angles.start": f"{side}/input_projection_1",
        "structure.angles.blocks.0.first": f"{side}/resblock1",
        "structure.angles.blocks.0.second": f"{side}/resblock2",
        "structure.angles.blocks.1.first": f"{side}/resblock1_1",
        "structure.angles.blocks.1.second": f"{side}/resblock2_1",
        "structure.angles.out": f"{side}/unnormalized_angles",
    }
    names: Names = {"structure.attention.weight": (f"{points}//trainable_point_weights", "same")}
    for module, scope in linears.items():
        names |= _linear(module, scope)
    return (
        names
        | _norm("structure.norm", f"{ROOT}structure_module/single_layer_norm")
        | _norm("structure.norm_pair", f"{ROOT}structure_module/pair_layer_norm")
        | _norm("structure.norm_attention", f"{FOLD}attention_layer_norm")
        | _norm("structure.transition.norm", f"{FOLD}transition_layer_norm")
    )


def _once() -> Names:
    """What is there once."""
    linears = {
        "input.left": f"{EVOFORMER}left_single",
        "input.right": f"{EVOFORMER}right_single",
        "input.target": f"{EVOFORMER}preprocess_1d",
        "input.alignment": f"{EVOFORMER}preprocess_msa",
        "input.position": f"{EVOFORMER}pair_activiations",  # as it is written there
        "recycling.distance": f"{EVOFORMER}prev_pos_linear",
        "extra": f"{EVOFORMER}extra_msa_activations",
        "evoformer.single": f"{EVOFORMER}single_activations",
        "template.pair": f"{TEMPLATE}embedding2d",
        "template.angles": f"{EVOFORMER}template_single_embedding",
        "template.angles_out": f"{EVOFORMER}template_projection",
        "heads.plddt.first": f"{ROOT}predicted_lddt_head/act_0",
        "heads.plddt.second": f"{ROOT}predicted_lddt_head/act_1",
        "heads.plddt.out": f"{ROOT}predicted_lddt_head/logits",
        "heads.distances": f"{ROOT}distogram_head/half_logits",
        "heads.residues": f"{ROOT}masked_msa_head/logits",
        "heads.resolved": f"{ROOT}experimentally_resolved_head/logits",
        "heads.errors": f"{ROOT}predicted_aligned_error_head/logits",
    }
    names: Names = {}
    for module, scope in linears.items():
        names |= _linear(module, scope)
    return (
        names
        | _norm("recycling.norm", f"{EVOFORMER}prev_msa_first_row_norm")
        | _norm("recycling.norm_pair", f"{EVOFORMER}prev_pair_norm")
        | _norm("template.norm", f"{TEMPLATE}output_layer_norm")
        | _norm("heads.plddt.norm", f"{ROOT}predicted_lddt_head/input_layer_norm")
        | _attention("template.attention", f"{EVOFORMER}template_embedding/attention", gated=False)
        | _structure()
    )


def places(parameters: list[str]) -> dict[str, Place]:
    """Where the file keeps each of our parameters, by its name."""
    once = _once()
    stacks = {
        "extra_stack": _block(f"{EVOFORMER}extra_msa_stack/", one_query=True),
        "evoformer": _block(f"{EVOFORMER}evoformer_iteration/", one_query=False),
        "template": _pair("", f"{TEMPLATE}template_pair_stack/__layer_stack_no_state/"),
    }
    place_by_name = {}
    for name in parameters:
        if name in once:
            place_by_name[name] = Place(*once[name])
            continue
        stack, _, suffix = name.partition(".blocks.")
        number, _, block_parameter = suffix.partition(".")
        place_by_name[name] = Place(*stacks[stack][block_parameter], int(number))
    return place_by_name


def read(arrays: dict[str, Tensor], place: Place) -> Tensor:
    """A parameter from the file's arrays. Raises IndexError where the stack has fewer blocks."""
    array = arrays[place.key]
    return ours_of(array if place.at is None else array[place.at], place.form).to(torch.float32)
