"""The roles of the layers inside a layer with low-rank adapters: base_layer(x) + scale B(A(x)).

Beside a column-cut layer x is whole: so is A, and B [out, rank] is cut as the layer is. Beside a row-cut layer x is
cut: A [rank, in] is cut as the layer is and its results are summed, and B is whole. What is summed or scattered has
`rank` features. Lengths of the layer's rows (DoRA) are cut beside columns and whole beside rows (`modes.row_lengths`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from cai_mesh.adapters import BASE, DROPOUT, adapters, drops_inputs, scales_rows, shareable_lengths
from cai_mesh.errors import PlanError
from cai_tensor_parallel.plans.plan import Role

ROWS = ("rowwise", "rowwise_split_input")
WHOLE = ("colwise_gather_output", "classifier", "vocab_head")
COLUMNS = ("colwise", "packed_colwise", *WHOLE, "kv_heads", "mla_kv_a_proj")


@dataclass(frozen=True)
class Inner:
    """A layer inside a layer with adapters.

    Args:
        name: its name in the model.
        is_cut: whether it is cut by the role of the layer that it is in; else it is whole.
        reads_parts: whether it is whole and reads what may be cut along the sequence.
    """

    name: str
    is_cut: bool
    reads_parts: bool = False


def inner_layers(name: str, module: nn.Module, role: Role) -> list[Inner]:
    """Return the layers inside a layer with adapters, the base layer first.

    Raises `PlanError` for a role that such a layer cannot have.
    """
    if role.kind not in (*ROWS, *COLUMNS):
        raise PlanError(
            f"{name} has adapters and cannot be cut as {role.kind}",
            expected=f"one of {', '.join((*ROWS, *COLUMNS))}",
            fix="leave it out of the adapters' targets, or pass a plan that leaves it whole",
        )
    _check(name, module)
    rows = role.kind in ROWS
    layers = [Inner(f"{name}.{BASE}", is_cut=True)]
    for pair in adapters(module):
        layers.append(Inner(f"{name}.{pair.down}", is_cut=rows))
        layers.append(Inner(f"{name}.{pair.up}", is_cut=not rows, reads_parts=rows))
    return layers


def dropouts(model: nn.Module, roles: Mapping[str, Role]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the dropout of adapters whose input each rank has whole, and of those whose input is cut by features."""
    shared, parts = [], []
    for name, module in model.named_modules():
        if adapters(module) and drops_inputs(module):
            is_part = name in roles and roles[name].kind == "rowwise"
            (parts if is_part else shared).extend(module.get_submodule(DROPOUT).children())
    return shared, parts


def check_dropout(name: str, module: nn.Module) -> None:
    """Raise PlanError for adapters that drop inputs which are cut along the sequence here and whole there."""
    if drops_inputs(module):
        raise PlanError(
            f"adapters of {name} drop a part of their inputs, which are cut along the sequence",
            got="lora_dropout > 0, sequence = True",
            fix="leave sequence out, or set the adapters' dropout to 0",
        )


def _check(name: str, module: nn.Module) -> None:
    if scales_rows(module) and not shareable_lengths(module):
        raise PlanError(
            f"the weight of {name} is scaled by row (DoRA) and cannot be cut",
            cause="its lengths are computed of the whole weight and its adapter",
            fix="adapters without DoRA, or leave this layer whole",
        )
