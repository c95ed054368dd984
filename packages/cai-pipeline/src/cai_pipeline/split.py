"""Turn a whole model into the stages of one rank of a pipeline, in place, with all parameter names kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh, axis_names
from cai_mesh.errors import PlanError
from cai_mesh.layout import attach_to, reduce_of, sites
from cai_mesh.trial import Trial
from cai_pipeline.balance import LOOKUP_COST, balance_ranks, check_enough_layers, explicit_layers
from cai_pipeline.partition import partition, tied_parameters
from cai_pipeline.placement import Held, Placement, place
from cai_pipeline.small_model import small_model
from cai_pipeline.stage import Stage, Stages
from cai_pipeline.structure import ModelStructure
from cai_pipeline.verify_split import CallCheck, Tried, structure_of, verify_split

Balance = Literal["auto"] | Sequence[int]


def split(
    model: nn.Module,
    mesh: AnyMesh,
    *,
    chunks: int = 1,
    placement: Placement = "loop",
    balance: Balance = "auto",
    trial: Trial | None = None,
) -> Any:
    """Keep this rank's stages of a model; placeholders without parameters replace the rest.

    Call it on all ranks, on the whole model (best on the meta device), before any other transform. First a small
    model of the same kind is split, its stages are run one after the other, and loss and all gradients are compared
    with those of the unsplit model; only then is `model` changed. Other ways to call it (training mode, flags, more
    tensors) are tried when they first occur, and refused where stages cannot do what the whole does. Parameters that
    the first and the last stage share (tied embeddings) stay on both, owned by the first, their `ReduceSpec.tied` the
    group of these two ranks.

    Args:
        model: a causal LM of transformers >= 5, or any model with a list of layers; may be on the meta device.
        mesh: a mesh with an axis "pp", or of one dimension with a name of its own. A degree of 1 keeps the whole model.
        chunks: stages per rank.
        placement: which stages they are: "loop" or "v", see `cai_pipeline.placement`.
        balance: "auto" for stages of equal cost, where cost is the number of parameters and those of an embedding
            count an eighth; or the number of layers of each stage, in the order of the stages.
        trial: the small model to try the split on; None: made of the model's transformers config.

    Returns:
        `model`, with its `Stages` at `model.cai_stages`.

    Raises:
        PlanError: the model cannot be split, or not into so many stages.
        MeshError: the mesh has no axis "pp".
    """
    mesh = ParallelMesh.of(mesh, alone="pp")
    mesh.require("pp", "split")
    ranks = mesh.degree("pp")
    if hasattr(model, "cai_stages"):
        raise PlanError("the model is split already", got=model.cai_stages)
    held = place(ranks, chunks, placement)
    if ranks == 1:
        _check_alone(chunks)
        model.cai_stages = Stages(held, {0: Stage(0, 1, range(0))})  # type: ignore[assignment]
        return model
    tried = trial or small_model(model)
    layers = len(list(model.get_submodule(tried.layers).children()))
    check_enough_layers(layers, len(held))
    structure = structure_of(tried)
    _check_same_parts(model, structure)
    stage_layers = _assign_layers(model, structure, held, balance)
    verify_split(tried, stage_layers, held)
    rank, tied = mesh.index("pp"), tied_parameters(model, structure, stage_layers)
    stages = partition(model, structure, stage_layers, held, rank, tied)
    stages.check = CallCheck(Tried(tried, tuple(stage_layers), held))
    if held[0] != held[-1]:
        _share(model, mesh, tied)
    return model


def _check_alone(chunks: int) -> None:
    if chunks != 1:
        raise PlanError(
            "a pipeline of one rank has one stage", got=f"chunks={chunks}", expected="chunks=1, or more ranks"
        )


def _share(model: nn.Module, mesh: ParallelMesh, tied: Mapping[str, nn.Parameter]) -> None:
    """Tell of parameters that the first and the last rank hold whom they are shared with, and who owns them."""
    group = _tied_group(mesh) if tied else None
    rank, last = mesh.index("pp"), mesh.degree("pp") - 1
    for name, parameter in tied.items():
        if rank not in (0, last):
            continue
        spec = replace(reduce_of(parameter), tied=group, owner=rank == 0)
        for module, local, held in list(sites(model)):
            if held is parameter:
                attach_to(module, local, name=name, reduce=spec)


def _check_same_parts(model: nn.Module, structure: ModelStructure) -> None:
    names = {name for name, _ in model.named_modules()}
    missing = sorted({structure.layers, *structure.before, *structure.after} - names)
    if missing:
        raise PlanError(
            f"{type(model).__name__} has other parts than the small model that its split is tried on",
            got=f"no {', '.join(missing)}",
            fix="pass split(..., trial=Trial(...)) with a small model of the same parts",
        )


def _assign_layers(model: nn.Module, structure: ModelStructure, held: Held, balance: Balance) -> list[range]:
    def size(name: str) -> float:
        return float(sum(parameter.numel() for parameter in model.get_submodule(name).parameters()))

    stack = model.get_submodule(structure.layers)
    costs = [size(f"{structure.layers}.{name}") for name, _ in stack.named_children()]
    if isinstance(balance, str):
        if balance != "auto":
            raise PlanError(
                "unknown balance", got=repr(balance), expected="'auto' or the layers of each stage"
            )
        first = LOOKUP_COST * sum(map(size, structure.before))
        return balance_ranks(costs, held, first=first, last=sum(map(size, structure.after)))
    return explicit_layers(balance, len(costs), len(held))


def _tied_group(mesh: ParallelMesh) -> dist.ProcessGroup | None:
    """The group of the first and last rank along pp; None on the ranks in between.

    Every rank creates the groups of all pipelines in the mesh, in the same order, as `new_group` requires.
    """
    if mesh.degree("pp") == 2:
        return mesh.group("pp")
    place = axis_names(mesh).index(*mesh.leaves("pp"))
    pipelines = mesh.dense.mesh.movedim(place, -1).reshape(-1, mesh.degree("pp")).tolist()
    own: dist.ProcessGroup | None = None
    for ranks in pipelines:
        created = dist.new_group([ranks[0], ranks[-1]])
        if dist.get_rank() in ranks and isinstance(created, dist.ProcessGroup):
            own = created
    return own
