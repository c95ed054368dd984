"""Turn a whole model into the stages of one rank of a pipeline, in place, with all parameter names kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh, all_gather_object, axis_names
from cai_mesh.errors import CheckpointError, PlanError
from cai_mesh.experts import visited_share
from cai_mesh.layout import attach_to, canonical_name, record_of, reduce_of, sites
from cai_mesh.trial import Trial
from cai_pipeline.plans.placement import Held, Placement, place
from cai_pipeline.stages.balance import LOOKUP_COST, balance_ranks, check_enough_layers, explicit_layers
from cai_pipeline.stages.partition import Tied, partition, tied_parameters
from cai_pipeline.stages.small_model import small_model
from cai_pipeline.stages.stage import Stage, Stages
from cai_pipeline.stages.structure import ModelStructure
from cai_pipeline.stages.verify_split import CallCheck, Tried, structure_of, verify_split

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
    stages share (tied embeddings) stay on all of them, owned by the one that names them first, their
    `ReduceSpec.tied` the group of these ranks.

    Stages are consecutive layers; of an encoder-decoder those of the encoder, then those of the decoder. A stage may
    have the last of the one and the first of the other.

    Args:
        model: a model of transformers >= 5 (causal LM, encoder-decoder, image classifier), or any model with a list
            of layers; may be on the meta device.
        mesh: a mesh with an axis "pp", or of one dimension with a name of its own. A degree of 1 keeps the whole model.
        chunks: stages per rank.
        placement: the order of stages over ranks: "loop" or "v", see `cai_pipeline.plans.placement`.
        balance: "auto" for stages of equal cost: parameters that a token goes through (of experts those it visits), an
            eighth of an embedding's; or the number of layers of each stage, in the order of the stages.
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
    stage_ranks = place(ranks, chunks, placement)
    if ranks == 1:
        _check_alone(chunks)
        model.cai_stages = Stages(stage_ranks, {0: Stage(0, 1, range(0))})  # type: ignore[assignment]
        return model
    tried = trial or small_model(model)
    _check_layers(model, tried, len(stage_ranks))
    structure = structure_of(tried)
    _check_same_parts(model, structure)
    stage_layers = _assign_layers(model, structure, stage_ranks, balance)
    verify_split(tried, stage_layers, stage_ranks)
    rank, tied = mesh.index("pp"), tied_parameters(model, structure, stage_layers)
    _guard_saving(model)
    stages = partition(model, structure, stage_layers, stage_ranks, rank, tied)
    stages.check = CallCheck(Tried(tried, tuple(stage_layers), stage_ranks))
    _share(model, mesh, tied, stage_ranks)
    return model


def _check_layers(model: nn.Module, tried: Trial, stages: int) -> None:
    lists = [tried.layers] if isinstance(tried.layers, str) else tried.layers
    check_enough_layers(sum(len(list(model.get_submodule(name).children())) for name in lists), stages)


def _guard_saving(model: nn.Module) -> None:
    """Let `save_pretrained` raise `CheckpointError` unless it is given a state dict with all of the model's names."""
    if hasattr(model, "save_pretrained"):
        names = frozenset(name for name, _ in model.named_parameters())
        model.save_pretrained = partial(_save_whole, model.save_pretrained, names)  # type: ignore[assignment]


def _save_whole(save: Callable[..., Any], names: frozenset[str], *args: Any, **kwargs: Any) -> Any:
    missing = sorted(names - (kwargs.get("state_dict") or {}).keys())
    if missing:
        raise CheckpointError(
            "save_pretrained would write the stages of one rank as a whole model",
            got=f"no {missing[0]}",
            fix="on all ranks: cai_mesh.checkpoint.save_hf(model, directory), or "
            "save_pretrained(directory, state_dict=cai_zero.full_state_dict(model)) on rank 0",
        )
    return save(*args, **kwargs)


def _check_alone(chunks: int) -> None:
    if chunks != 1:
        raise PlanError(
            "a pipeline of one rank has one stage", got=f"chunks={chunks}", expected="chunks=1, or more ranks"
        )


def _share(model: nn.Module, mesh: ParallelMesh, tied: Mapping[str, Tied], stage_ranks: Held) -> None:
    """Tell of parameters that several ranks hold whom they are shared with, and who owns them."""
    rank, groups = mesh.index("pp"), {}
    for name, tie in tied.items():
        ranks = tuple(sorted({stage_ranks[stage] for stage in tie.stages}))
        if len(ranks) == 1:
            continue
        if ranks not in groups:
            groups[ranks] = _group_of(mesh, ranks)
        if rank not in ranks:
            continue
        spec = replace(reduce_of(tie.parameter), tied=groups[ranks], owner=rank == stage_ranks[tie.owner])
        for module, local, parameter in list(sites(model)):
            if parameter is tie.parameter:
                attach_to(module, local, name=name, reduce=spec)


def check_shared(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise PlanError where stages have different parts of a parameter that they share. Collective."""
    local_layouts = {
        canonical_name(name, parameter): record_of(parameter).layout
        for name, parameter in model.named_parameters()
        if reduce_of(parameter).tied is not None
    }
    of_ranks = all_gather_object(local_layouts, group)
    for name in sorted({name for layouts in of_ranks for name in layouts}):
        layouts = [layouts[name] for layouts in of_ranks if name in layouts]
        if len(set(layouts)) > 1:
            raise PlanError(
                f"pipeline stages share {name}, and do not hold the same part of it",
                got=", ".join(
                    "all of it" if layout is None else f"a part {layout.local_shape}" for layout in layouts
                ),
                cause="tensor-parallel ranks cut it on one stage, not on another, where it has another name",
                fix="pass parallelize(..., plan) with roles for all its names, or untie the weights",
            )


def _check_same_parts(model: nn.Module, structure: ModelStructure) -> None:
    names = {name for name, _ in model.named_modules()}
    lists = {layer_list.name for layer_list in structure.lists}
    missing = sorted(
        {
            *lists,
            *(name for layer_list in structure.lists for name in (*layer_list.before, *layer_list.after)),
        }
        - names
    )
    if missing:
        raise PlanError(
            f"{type(model).__name__} has other parts than the small model that its split is tried on",
            got=f"no {', '.join(missing)}",
            fix="pass split(..., trial=Trial(...)) with a small model of the same parts",
        )


def _assign_layers(
    model: nn.Module, structure: ModelStructure, stage_ranks: Held, balance: Balance
) -> list[range]:
    def size(name: str) -> float:
        parameters = model.get_submodule(name).named_parameters(prefix=name)
        return sum(
            p.numel() * visited_share(getattr(model, "config", None), full, p) for full, p in parameters
        )

    costs = [size(name) for name in structure.layer_names(model)]
    if isinstance(balance, str):
        if balance != "auto":
            raise PlanError(
                "unknown balance", got=repr(balance), expected="'auto' or the layers of each stage"
            )
        first_cost = LOOKUP_COST * sum(map(size, structure.lists[0].before))
        last_cost = sum(map(size, structure.lists[-1].after))
        for (ended, layers), (begun, _) in pairwise(structure.ranges(model)):
            costs[layers.stop - 1] += sum(map(size, ended.after))
            costs[layers.stop] += LOOKUP_COST * sum(map(size, begun.before))
        return balance_ranks(costs, stage_ranks, first=first_cost, last=last_cost)
    return explicit_layers(balance, len(costs), len(stage_ranks))


def _group_of(mesh: ParallelMesh, members: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of some of the ranks along pp; None on the others.

    Every rank creates the groups of all pipelines in the mesh, in the same order, as `new_group` requires.
    """
    if len(members) == mesh.degree("pp"):
        return mesh.group("pp")
    place = axis_names(mesh).index(*mesh.leaves("pp"))
    pipelines = mesh.dense.mesh.movedim(place, -1).reshape(-1, mesh.degree("pp")).tolist()
    local_group: dist.ProcessGroup | None = None
    for ranks in pipelines:
        created = dist.new_group([ranks[member] for member in members])
        if dist.get_rank() in ranks and isinstance(created, dist.ProcessGroup):
            local_group = created
    return local_group
