"""Parameters that are cut by themselves: those of modules that are no linear layer, as experts and attention sinks."""

from __future__ import annotations

from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients import own_products
from cai_mesh.layout import Shard
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.plans.plan import Role


def cut_parameter(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Cut the parameter `role.parameter` of a module: colwise its last dimension but one, rowwise the last.

    Raises `PlanError` where the dimension does not divide, or the module is a layer that has roles itself.
    """
    param = module._parameters[role.parameter]
    assert param is not None  # it has been matched by its name
    name, degree = f"{context.module_name}.{role.parameter}", context.cutter.degree
    if own_products(module) is not None or isinstance(module, nn.Linear | nn.Embedding):
        raise PlanError(
            f"{name} is the parameter of a layer, which is cut as a whole",
            got=type(module).__name__,
            fix=f"give the role to {context.module_name}",
        )
    dim = max(param.dim() - 2, 0) if role.kind.endswith("colwise") else param.dim() - 1
    blocks, unit = _packing(module, role)
    if param.dim() == 0 or param.shape[dim] % (blocks * unit * degree):
        raise PlanError(
            f"{name} does not divide over the ranks as {role.kind}",
            got=f"{tuple(param.shape)}, dimension {dim}, over {degree} ranks",
            expected=f"a multiple of {blocks * unit * degree}",
            fix="choose a tensor-parallel degree that divides it",
        )
    sections = (param.shape[dim] // blocks,) * blocks if blocks > 1 else None
    context.cutter.cut(module, role.parameter, Shard(dim, sections, unit))


def _packing(module: nn.Module, role: Role) -> tuple[int, int]:
    """(blocks side by side, features that stay together): of gate and up what the module says, else what the role does.

    Experts of transformers have all gates before all ups (`is_concatenated`), or a gate and its up in turn.
    """
    concatenated = getattr(module, "is_concatenated", None)
    if concatenated is None or not role.parameter.startswith("gate_up"):
        return role.blocks, 1
    return (2, 1) if concatenated else (1, 2)
