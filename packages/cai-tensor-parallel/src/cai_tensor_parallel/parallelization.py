"""`parallelize`: a plan, a mode and a mesh applied to a model, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from cai_mesh.adapters import base_layer
from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.layout import layout_of, refresh
from cai_mesh.storage import exchanged, follow_structure, guard_state, is_followed, show_gradients
from cai_mesh.trial import SmallModel, Trial
from cai_tensor_parallel.cut.between import mark_parts, refusal, watch
from cai_tensor_parallel.cut.heads import (
    check_uneven,
    informed,
    shared_heads_of,
    shares_heads,
    uneven_attentions,
)
from cai_tensor_parallel.cut.loss import is_next_token_loss
from cai_tensor_parallel.cut.saving import CutState
from cai_tensor_parallel.cut.transform import Cut
from cai_tensor_parallel.cut.vocabulary import vocabulary_ends
from cai_tensor_parallel.cut.wrapping import guard_wrapping
from cai_tensor_parallel.experts.search import Search
from cai_tensor_parallel.finding.parts import plan_of_parts
from cai_tensor_parallel.modes import check_axes
from cai_tensor_parallel.modes.cutter import Cutter
from cai_tensor_parallel.modes.forms import GRIDS
from cai_tensor_parallel.modes.overlap import check_partners
from cai_tensor_parallel.plans.matching import match
from cai_tensor_parallel.plans.plan import Plan, Role
from cai_tensor_parallel.trial.verify import RANKS, on_first_rank, trial_of, verified


def parallelize(
    model: nn.Module,
    mesh: AnyMesh,
    plan: Plan | None = None,
    *,
    mode: str = "1d",
    sequence: bool = False,
    overlap: bool = False,
    logits: Literal["whole", "sharded"] = "whole",
    trial: Trial | None = None,
) -> nn.Module:
    """Cut the parameters of a model over the `tp` axis of a mesh and let its modules compute with the parts.

    Names of parameters are kept; each cut one carries a `Layout`. Meta-device models are fine. All ranks of the axis
    must have the same input batch and random seed.

    Experts are cut by hidden features, unless `parallelize_experts` has spread them. Where there are fewer key/value
    heads than ranks, or they do not divide, their layers stay whole, and each rank uses the heads that its query heads
    need. Query heads that do not divide are cut in runs of one length, the last rank has fewer.

    First a small model of the same kind is cut over virtual ranks and compared with the whole one, all gradients too. A
    model that is not of transformers is tried where it brings a `trial`.

    Args:
        mesh: a mesh with an axis "tp", or its sub-axes, or of one dimension with a name of its own.
        plan: None reads the one the model carries or the built-in one, see `plan_for`; one rank needs none.
        mode: "1d": features between a column cut and a row cut are cut, Megatron's way. "2d" (axes `tp_row`,
            `tp_col`), "2.5d" (`tp_depth` too) and "3d" (`tp_i`, `tp_j`, `tp_k`): samples and features stay cut from
            the embedding to the head, and no rank ever holds a whole hidden state; see `sub_axes`.
        sequence: whether what is not cut by features is cut along the sequence: norms, dropout, residuals; mode 1d.
        overlap: whether some tokens are multiplied while others travel between one host's GPUs; needs `sequence`, and
            is not for FP8 layers.
        logits: the form of a vocabulary-cut head's logits. "whole": [..., V] on every rank, as `generate()` and any
            loss expect. "sharded": [..., V/tp], never gathered, for `vocab_parallel_cross_entropy` and the model's
            `loss_function` where it is the loss of next tokens; a grid cuts samples, too.
        trial: a small model of the same kind; None: made of the model's transformers config.

    Returns the model. Raises `PlanError` for what cannot be cut, a glob of `plan` that matches nothing, or a small
    model that computes something else; `MeshError` for a mesh without such axes.
    """
    transform = Cut(mode, logits, sequence, overlap)
    mesh = ParallelMesh.of(mesh, alone="tp")
    mesh.require("tp", "parallelize")
    degree = mesh.degree("tp")
    if degree == 1 and plan is None:
        return model
    search = Search.of(model)
    resolved = search.changed(plan) if plan else search(model, degree)
    roles = match(resolved, model)
    if logits == "sharded" and plan is None:
        _check_head(model, roles)
    if degree == 1:
        return model
    _check_ranks(transform, mesh)
    refresh(model)
    small = trial or _trial_of(model, roles, transform, mesh)
    plan = _proved(model, mesh, resolved, transform, small, search, plan and resolved)
    transform(model, plan, mesh, Cutter.along(mesh, "tp"))
    _guard(model, mesh, transform)
    return model


def _check_ranks(transform: Cut, mesh: ParallelMesh) -> None:
    """Raise where the mesh has not the axes of the mode, or its GPUs cannot do what is asked."""
    check_axes(transform.mode, mesh)
    group = mesh.group("tp")
    if transform.overlap and group is not None:
        check_partners(group)


def _trial_of(
    model: nn.Module, roles: dict[str, Role], transform: Cut, mesh: ParallelMesh
) -> SmallModel | None:
    """The small model of a model of transformers, with heads that do not divide where its own do not."""
    uneven = bool(uneven_attentions(model, roles, transform.degree(mesh)))
    return trial_of(model, labelled=not transform.sharded or is_next_token_loss(model), uneven=uneven)


def _guard(model: nn.Module, mesh: ParallelMesh, transform: Cut) -> None:
    """Let what would go wrong in silence be refused: parts between cuts, in files, taken for copies by wrappers."""
    if transform.mode == "1d":
        watch(model, _refuse(model))
        mark_parts(model)
    guard_state(model, CutState)
    guard_wrapping(model, mesh)
    follow_structure(model, _Added(transform))
    show_gradients(model, mesh)


@dataclass(frozen=True)
class _Added:
    """Judges parameters that a cut model was given later: among whole hidden states they are as they were."""

    transform: Cut

    def __call__(self, model: nn.Module, new: list[str]) -> None:
        trained = [name for name in new if model.get_parameter(name).requires_grad]
        around = [name for name in trained if _wraps_cut(model, name)]
        if around or (trained and (self.transform.sequence or self.transform.mode != "1d")):
            raise exchanged(model, (around or trained)[0])
        if new and self.transform.mode == "1d":
            watch(model, _refuse(model))  # they may lie between two cuts


def _wraps_cut(model: nn.Module, name: str) -> bool:
    """Whether a parameter is of a module, or of one in it, that stands around a cut layer, as an adapter does."""
    parts = name.split(".")[:-1]
    while parts:
        module = model.get_submodule(".".join(parts))
        if is_followed(module):
            return False
        if any(layout_of(param).sharded_axes for param in module.parameters()):
            return True
        parts.pop()
    return False


def _proved(
    model: nn.Module,
    mesh: ParallelMesh,
    plan: Plan,
    transform: Cut,
    small: Trial | SmallModel | None,
    search: Search,
    passed: Plan | None,
) -> Plan:
    """The plan, with the roles of parameters that its trial shows to be shared.

    Args:
        small: the small model that it is tried on, by the plan that was `passed`; without one, or with one that has no
            roles, by the one that `search` finds for the small model.
    """
    if small is None and transform.mode in GRIDS:
        raise PlanError(
            f"mode {transform.mode} tries itself on a small model first, and there is none",
            got=type(model).__name__,
            fix="pass trial=Trial(...) with a small model of the same modules",
        )
    degree = transform.degree(mesh)
    uneven = uneven_attentions(model, match(plan, model), degree)
    if uneven:
        built = None if small is None else small.build()
        tried = plan if built is None else passed or plan_of_parts(built, RANKS) or plan
        check_uneven(uneven, transform.mode, degree, built, tried)
    if small is None:
        return plan
    shared = shared_heads_of(model) % degree != 0
    if shared and transform.mode in GRIDS:
        raise PlanError(
            "the key/value heads do not divide over the ranks that share features",
            got=f"{shared_heads_of(model)} key/value heads over {degree} ranks",
            fix='choose a degree that divides them, or mode="1d"',
        )
    shared = not uneven and (shared or shares_heads(informed(model, match(plan, model), degree)))
    group = mesh.group("tp")
    assert group is not None  # more than one rank
    planned = passed if passed and passed.roles else search
    added = on_first_rank(group, lambda: verified(small, planned, transform, 4 if shared else RANKS))
    return replace(plan, roles={**plan.roles, **added})


def _refuse(model: nn.Module) -> Callable[[str, list[torch.Tensor]], None]:
    def refuse(name: str, leaves: list[torch.Tensor]) -> None:
        raise refusal(model, name, leaves)

    return refuse


def _check_head(model: nn.Module, roles: dict[str, Role]) -> None:
    for getter, end in vocabulary_ends(model):
        if next(end.parameters(), None) is None:  # it stands for one of another pipeline stage
            continue
        head_is_cut = any(
            base_layer(model.get_submodule(name)) is end for name, role in roles.items() if not role.parameter
        )
        if getter == "get_output_embeddings" and not head_is_cut:
            raise PlanError(
                f"the logits of {type(model).__name__} cannot stay cut: its output layer is whole in its plan",
                got=f"{type(end).__name__}, tied to what is not cut, or not proved to give the same when it is cut",
                fix='parallelize(..., logits="whole"), or pass a plan that gives it the role vocab_head',
            )
