"""`parallelize`: a plan, a mode and a mesh applied to a model, in place."""

from __future__ import annotations

import fnmatch

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh import comm
from cai_mesh.errors import MeshError, PlanError, did_you_mean
from cai_tensor_parallel.modes import MODES
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.plan import Plan, match, plan_for
from cai_tensor_parallel.shard import Cutter
from cai_tensor_parallel.vocab import CausalLMLoss, vocab_start


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
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
        mesh: with an axis named "tp", or of one dimension.
        plan: None reads the one the model carries or the built-in one, see `plan_for`.
        mode: "1d".

    Raises `PlanError` when heads or features do not divide over the axis, a glob matches nothing, or a role is not
    supported; `MeshError` when the mesh has no such axis. Returns the model.
    """
    if mode not in MODES:
        raise PlanError("unknown tensor-parallel mode", got=mode, fix=did_you_mean(mode, MODES))
    axis = _axis(mesh)
    plan = plan or plan_for(model)
    degree = comm.degree(mesh, axis)
    roles = match(plan, model)
    if degree == 1:
        return model
    _check_heads(model, degree)
    cutter = Cutter(axis, degree, comm.coordinate(mesh)[axis])
    context = ModeContext(_group(mesh, axis), cutter)
    for name, role in roles.items():
        module = model.get_submodule(name)
        if any(True for _ in module.parameters(recurse=False)):
            context.module_name = name
            MODES[mode](module, role, context)
            if role.kind == "vocab_head" and hasattr(model, "loss_function"):
                model.loss_function = CausalLMLoss(context.group, vocab_start(module.weight))  # type: ignore[arg-type]
    _divide_attributes(model, plan, degree)
    return model


def _axis(mesh: DeviceMesh) -> str:
    names = comm.axis_names(mesh)
    if "tp" in names:
        return "tp"
    if len(names) == 1:
        return names[0]
    raise MeshError(
        "the mesh has no tensor-parallel axis", got=names, expected='an axis "tp", or one dimension'
    )


def _group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    found = comm.group(mesh, axis)
    assert found is not None  # more than one rank
    return found


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
