"""`parallelize_experts`: the experts of a model's layers spread over the ranks of a mesh, in place."""

from __future__ import annotations

from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.experts import visits_of
from cai_mesh.layout import refresh
from cai_mesh.storage import exchanged, follow_structure, guard_state, show_gradients
from cai_mesh.trial import Trial
from cai_tensor_parallel.cut.saving import CutState
from cai_tensor_parallel.cut.wrapping import guard_wrapping
from cai_tensor_parallel.experts.batched import spread_batched
from cai_tensor_parallel.experts.cutting import keep_own, reduce_among_copies
from cai_tensor_parallel.experts.finding import (
    ExpertsPlan,
    ExpertsRole,
    experts_here,
    experts_of,
    find_experts,
    spread_experts,
)
from cai_tensor_parallel.experts.layer import ExpertMaths, Spread, own_forward, spread
from cai_tensor_parallel.experts.routes import parts_of
from cai_tensor_parallel.experts.trial import verify_experts
from cai_tensor_parallel.modes.cutter import Cutter
from cai_tensor_parallel.trial.verify import on_first_rank, trial_of


def parallelize_experts(
    model: nn.Module,
    mesh: AnyMesh,
    plan: ExpertsPlan | None = None,
    *,
    maths: ExpertMaths = own_forward,
    trial: Trial | None = None,
) -> nn.Module:
    """Spread the experts of a model's layers over the `ep` axis of a mesh: each rank keeps some of each layer's.

    Tokens travel to the ranks of the experts that they visit, each once to a rank, and what is made of them travels
    back (expert parallelism: Lepikhin et al., arXiv:2006.16668). No token is dropped. Ranks of `ep` are ranks of
    `dp_shard`, `cp` and `tp`: they read samples of their own. Names of parameters are kept; each cut one carries a
    `Layout` and a `ReduceSpec`, by which cai-zero's optimizers, norms and checkpoints go. Meta-device models are fine.

    All ranks of `ep` run the same number of forwards and backwards.

    First each kind of layer is tried in two parts, on a small model of the same kind, and compared with itself whole. A
    model that is not of transformers is tried where it brings a `trial`.

    Args:
        mesh: `ParallelMesh.of(mesh, ep=...)`.
        plan: the layers of experts by name; None: found by their structure, see `find_experts`.
        maths: computes with the experts that a rank holds; see `ExpertMaths`. Default: the layer's own forward, which
            batched layers always compute by.
        trial: a small model of the same kind; None: made of the model's transformers config.

    Returns the model; a pipeline's stage without experts as it was. Raises `PlanError` where no experts are found,
    their number does not divide, or parts of a small layer do not sum up to the whole; `MeshError` for a mesh without
    an expert view.
    """
    mesh = ParallelMesh.of(mesh)
    if mesh.degree("ep") == 1:
        return model
    is_stage = hasattr(model, "cai_stages")
    roles = experts_here(model, plan) if is_stage else find_experts(model, plan)
    if not roles:
        return model
    for name, role in roles.items():
        _check(name, model.get_submodule(name), role, mesh)
    refresh(model)
    small = trial or trial_of(model, labelled=False)
    group = mesh.group("ep")
    if small is not None and group is not None:
        on_first_rank(group, lambda: verify_experts(small, plan) or {})
    visits = visits_of(getattr(model, "config", None))
    for name, role in roles.items():
        _spread(model.get_submodule(name), role, mesh, maths, visits)
    guard_state(model, CutState)
    guard_wrapping(model, mesh, "ep")
    follow_structure(model, _refuse_inside)
    show_gradients(model, mesh)
    return model


def _spread(
    layer: nn.Module, role: ExpertsRole, mesh: ParallelMesh, maths: ExpertMaths, visits: int | None
) -> None:
    """Cut a layer to this rank's experts, and let its forward compute with those of all ranks."""
    experts, group = experts_of(layer, role), mesh.group("ep")
    assert group is not None  # more than one rank
    ranks = Spread(group, tuple(parts_of(experts, mesh.degree("ep"))), mesh.group("tp"))
    keep_own(layer, role, Cutter.along(mesh, "ep"))
    reduce_among_copies(layer, role, mesh)
    if role.form == "batched":
        spread_batched(layer, role, ranks, visits or experts)
    else:
        spread(layer, role, ranks, maths)


def _refuse_inside(model: nn.Module, new: list[str]) -> None:
    """Refuse trained parameters that a layer of spread experts was given later: their gradients are of a part."""
    layers = tuple(f"{name}." for name in spread_experts(model))
    trained = [name for name in new if name.startswith(layers) and model.get_parameter(name).requires_grad]
    if trained:
        raise exchanged(model, trained[0])


def _check(name: str, layer: nn.Module, role: ExpertsRole, mesh: ParallelMesh) -> None:
    """Raise `PlanError` for a layer that is changed already, that shares what ranks would sum, or does not divide."""
    if "forward" in vars(layer):
        raise PlanError(
            f"{name} has a forward of its own, which the exchange of tokens would pass over",
            got=getattr(layer.forward, "__module__", layer.forward),
            expected="the forward of its class",
            cause="somebody changed the layer, or its experts are spread already",
            fix="parallelize_experts before what changes forwards, and once",
        )
    shared = [
        key for key, param in layer.named_parameters() if key not in role.parameters and param.requires_grad
    ]
    if shared and mesh.group("tp") is not None:
        raise PlanError(
            f"{name} has parameters that all experts share, and tensor ranks divide its tokens",
            got=", ".join(shared),
            expected="parameters that are stacked by expert",
            cause="each tensor rank would have the gradient of its own tokens alone",
            fix="leave tensor parallelism out, or freeze them",
        )
    experts, degree = experts_of(layer, role), mesh.degree("ep")
    if experts % degree:
        raise PlanError(
            f"the experts of {name} do not divide over the ranks",
            got=f"{experts} experts over {degree} ranks",
            expected=f"a multiple of {degree}",
            fix="choose a degree ep that divides them",
        )
