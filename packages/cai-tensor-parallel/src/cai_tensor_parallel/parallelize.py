"""`parallelize`: a plan, a mode and a mesh applied to a model, in place."""

from __future__ import annotations

import fnmatch

from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError, did_you_mean
from cai_mesh.layout import keep_attached, refresh
from cai_tensor_parallel.modes import MODES
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.plan import Plan, match, plan_for
from cai_tensor_parallel.shard import Cutter
from cai_tensor_parallel.vocab import CausalLMLoss, vocab_start


def parallelize(
    model: nn.Module,
    mesh: AnyMesh,
    plan: Plan | None = None,
    *,
    mode: str = "1d",
) -> nn.Module:
    """Cut the parameters of a model over the `tp` axis of a mesh and let its modules compute with the parts.

    Names of parameters are kept; each cut one carries a `Layout`. Meta-device models are fine. The input batch must
    be the same on all ranks of the axis. With a vocabulary-cut head the model's logits are [..., V/tp] (see
    `gather_logits`) and its `loss_function`, if it has one, is the vocabulary-parallel one, so
    `model(ids, labels=ids).loss` is what it was.

    Args:
        mesh: with an axis "tp", or its sub-axes, or of one dimension with a name of its own.
        plan: None reads the one the model carries or the built-in one, see `plan_for`; one rank needs none.
        mode: "1d".

    Raises `PlanError` when heads or features do not divide over the axis, a glob matches nothing, or a role is not
    supported; `MeshError` when the mesh has no such axis. Returns the model.
    """
    if mode not in MODES:
        raise PlanError("unknown tensor-parallel mode", got=mode, fix=did_you_mean(mode, MODES))
    mesh = ParallelMesh.of(mesh, alone="tp")
    mesh.require("tp", "parallelize")
    degree = mesh.degree("tp")
    if degree == 1 and plan is None:
        return model
    plan = plan or plan_for(model)
    roles = match(plan, model)
    if degree == 1:
        return model
    refresh(model)
    _check_heads(model, degree)
    group = mesh.group("tp")
    assert group is not None  # more than one rank
    cutter = Cutter.along(mesh, "tp")
    context = ModeContext(group, cutter)
    for name, role in roles.items():
        module = model.get_submodule(name)
        if any(True for _ in module.parameters(recurse=False)):
            context.module_name = name
            MODES[mode](module, role, context)
            if role.kind == "vocab_head" and hasattr(model, "loss_function"):
                model.loss_function = CausalLMLoss(context.group, vocab_start(module.weight))  # type: ignore[arg-type]
    _divide_attributes(model, plan, degree)
    keep_attached(model)
    return model


def _check_heads(model: nn.Module, degree: int) -> None:
    config = getattr(model, "config", None)
    for attribute, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key/value heads"),
    ):
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % degree:
            raise PlanError(
                f"the {what} do not divide over the tensor-parallel ranks",
                got=f"{heads} {what} over {degree} ranks",
                fix=f"choose a degree that divides {heads}",
            )


def _divide_attributes(model: nn.Module, plan: Plan, degree: int) -> None:
    for name, module in model.named_modules():
        for glob, attributes in plan.divided.items():
            if fnmatch.fnmatchcase(name, glob):
                for attribute in attributes:
                    if hasattr(module, attribute):
                        setattr(module, attribute, getattr(module, attribute) // degree)
