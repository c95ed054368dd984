"""`parallelize`: a plan, a mode and a mesh applied to a model, in place."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError, did_you_mean
from cai_mesh.layout import keep_attached, refresh
from cai_mesh.trial import Trial
from cai_tensor_parallel.between import refusal, watch
from cai_tensor_parallel.loss import cut_loss, is_next_token_loss
from cai_tensor_parallel.modes import MODES
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.plan import Plan, Role, match, plan_for
from cai_tensor_parallel.saving import guard_saving
from cai_tensor_parallel.shard import Cutter
from cai_tensor_parallel.verify import trial_of, verified

LOGITS = ("whole", "sharded")


def parallelize(
    model: nn.Module,
    mesh: AnyMesh,
    plan: Plan | None = None,
    *,
    mode: str = "1d",
    logits: Literal["whole", "sharded"] = "whole",
    trial: Trial | None = None,
) -> nn.Module:
    """Cut the parameters of a model over the `tp` axis of a mesh and let its modules compute with the parts.

    Names of parameters are kept; each cut one carries a `Layout`. Meta-device models are fine. The input batch must
    be the same on all ranks of the axis, and they must draw the same random numbers (dropout).

    First a small model of the same kind is cut over two virtual ranks, and what it returns, its loss and all gradients
    are compared with the whole one's. Parameters between a column cut and a row cut that the plan forgot get their
    gradients summed. A model that is not of transformers is tried where it brings a `trial`; without one only
    gradients are looked after: what has parameters, or is whole, between two cuts is refused at the first forward.

    Args:
        mesh: with an axis "tp", or its sub-axes, or of one dimension with a name of its own.
        plan: None reads the one the model carries or the built-in one, see `plan_for`; one rank needs none.
        mode: "1d".
        logits: of a vocabulary-cut head. "whole": [..., V] on every rank, as the model's loss, `generate()` and a
            loss of your own expect. "sharded": [..., V/tp], never gathered; `vocab_parallel_cross_entropy` takes them,
            and so does the model's `loss_function` where it is the loss of next tokens.
        trial: a small model of the same kind; None: made of the model's transformers config.

    Raises `PlanError` when heads or features do not divide over the axis, a glob matches nothing, a role is not
    supported, or the small model computes something else; `MeshError` when the mesh has no such axis. Returns the
    model.
    """
    cut = _Cut(mode, logits)
    mesh = ParallelMesh.of(mesh, alone="tp")
    mesh.require("tp", "parallelize")
    degree = mesh.degree("tp")
    if degree == 1 and plan is None:
        return model
    given, plan = plan, plan or plan_for(model)
    match(plan, model)
    if degree == 1:
        return model
    refresh(model)
    _check_heads(model, degree)
    tried = trial or trial_of(model, labelled=logits == "whole" or is_next_token_loss(model))
    if tried is not None:
        added = verified(tried, given, cut)
        plan = Plan({**plan.roles, **added}, plan.divided)
    group = mesh.group("tp")
    assert group is not None  # more than one rank
    cut(model, plan, group, Cutter.along(mesh, "tp"))
    watch(model, _refuse(model))
    guard_saving(model)
    return model


@dataclass(frozen=True)
class _Cut:
    """What is done to a model on one rank of a group. Globs of the plan that match nothing are left out."""

    mode: str
    logits: str

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError("unknown tensor-parallel mode", got=self.mode, fix=did_you_mean(self.mode, MODES))
        if self.logits not in LOGITS:
            raise PlanError("unknown form of logits", got=self.logits, fix=did_you_mean(self.logits, LOGITS))

    def __call__(self, model: nn.Module, plan: Plan, group: dist.ProcessGroup, cutter: Cutter) -> None:
        context = ModeContext(group, cutter, sharded_logits=self.logits == "sharded")
        for name, role in match(plan, model, strict=False).items():
            for module_name, module in _with_parameters(name, model.get_submodule(name), role):
                context.module_name = module_name
                MODES[self.mode](module, role, context)
                if role.kind == "vocab_head" and context.sharded_logits:
                    cut_loss(model, module, group)
        _check_sharing(model, cutter)
        _divide_attributes(model, plan, cutter.degree)
        keep_attached(model)


def _with_parameters(name: str, module: nn.Module, role: Role) -> list[tuple[str, nn.Module]]:
    """The module itself, or, where a role is for whatever is inside, the parts of it that have parameters.

    None of a module without any: it stands for one of another pipeline stage. Raises `PlanError` for one that should
    be cut and has its parameters in parts of it, as a layer with an adapter has.
    """
    if any(True for _ in module.parameters(recurse=False)):
        return [(name, module)]
    inside = [n for n, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))]
    if role.kind.startswith("replicated"):
        return [(f"{name}.{n}", module.get_submodule(n)) for n in inside]
    if inside:
        raise PlanError(
            f"{name} cannot be cut as {role.kind}",
            got=f"{type(module).__name__}, whose parameters are in {', '.join(inside)}",
            expected="a layer with a weight of its own",
            cause="a layer that is wrapped (an adapter) or whose weight is computed (a parametrization)",
            fix="parallelize before wrapping, merge what wraps it, or pass a plan that leaves it and its pair whole",
        )
    return []


def _check_sharing(model: nn.Module, cutter: Cutter) -> None:
    for name, param in model.named_parameters(remove_duplicate=False):
        if cutter.has_cut(param):
            raise PlanError(
                f"{name} is shared with a layer that is cut, and its own module is not cut",
                fix="give both modules roles that cut alike, or untie them",
            )


def _refuse(model: nn.Module) -> Callable[[str, list[torch.Tensor]], None]:
    def refuse(name: str, leaves: list[torch.Tensor]) -> None:
        raise refusal(model, name, leaves)

    return refuse


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
