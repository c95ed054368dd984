"""A loop's entries: `shard_optimizer` for stages 0 to 2, `shard_module` for stage 3, and what finds either again."""

from __future__ import annotations

import contextlib
from typing import Literal

import torch
from torch import nn

from cai_mesh.comm import AnyMesh
from cai_mesh.errors import PlanError
from cai_mesh.layout import refresh
from cai_mesh.protocols import Residency
from cai_mesh.storage import (
    OnDevice,
    check_alone,
    check_arguments,
    check_elementwise,
    exchanged,
    follow_structure,
    guard_state,
    reduces_itself,
)
from cai_zero.precision import MixedPrecision
from cai_zero.reduction.compression import Compression
from cai_zero.replicated.optimizer import ShardedOptimizer
from cai_zero.stage3.gathering import Gather
from cai_zero.stage3.holding import hold
from cai_zero.stage3.initial_values import Materialize
from cai_zero.stage3.sharding import ModuleSharding, Options


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    mesh: AnyMesh | None,
    *,
    model: nn.Module | None = None,
    stage: int = 1,
    precision: MixedPrecision | None = None,
    overlap_gather: bool = False,
    compression: Compression | None = None,
    copy_engines: bool = False,
) -> ShardedOptimizer:
    """Shard an elementwise optimizer, and with stage 2 the gradients, over the data ranks of a mesh.

    Args:
        optimizer: any torch optimizer that treats elements independently (SGD, Adam, AdamW, RMSprop ...), or one of
            `cai_zero.optimizers`, before its first step and so without state. Its param groups are kept; its
            parameters move into contiguous chunks.
        mesh: see `cai_zero.reduction.ranks.RankTable` for how its data axes are found. None: one process.
        model: the module that owns the parameters; gradients are then reduced while backward runs. Stage 1 works
            without it and reduces `param.grad` in `step`.
        stage: 0 (reduce gradients, as DDP), 1 (shard optimizer state and master weights), 2 (also gradients).
        precision: dtypes. With `compute=torch.bfloat16` all parameters, frozen ones too, become bfloat16 and the
            optimizer steps float32 master weights. Buffers are left as they are. A parameter unfrozen later starts from
            its rounded value; in stage 3 from the one it had.
        overlap_gather: gather the new parameters while the next forward runs, each awaited by the block that uses it.
            What reads or writes parameters between `step` and that forward waits for them.
        compression: the tensors that travel in one byte an element, in stages 1 and 2. With compressed weights the
            model's parameters are the rounded ones from the beginning, and the optimizer steps master weights apart.
        copy_engines: gather and reduce by copies between the GPUs of one host, not by kernels on multiprocessors.

    Raises `PlanError` when the optimizer's parameters are not the model's, appear twice, or cannot be sharded, for an
    optimizer that is not elementwise, and for several ranks without a mesh.
    """
    precision = precision or MixedPrecision()
    _check(optimizer, mesh, model, stage, overlap_gather)
    _check_split(precision, compression, stage)
    if model is not None:
        refresh(model)
    sharded = ShardedOptimizer(
        optimizer, mesh, model, stage, precision, overlap_gather, compression, copy_engines
    )
    if model is not None:
        reduces_itself(model)
    if model is not None and precision.compute is not None:
        for param in model.parameters():
            if not param.requires_grad and param.is_floating_point():
                param.data = param.data.to(precision.compute)
    return sharded


def _check(
    optimizer: torch.optim.Optimizer,
    mesh: AnyMesh | None,
    model: nn.Module | None,
    stage: int,
    overlap_gather: bool,
) -> None:
    """Raise `PlanError` for what no stage of an optimizer could follow."""
    if stage not in (0, 1, 2):
        raise PlanError(
            "unknown ZeRO stage for an optimizer",
            got=stage,
            expected="0, 1 or 2",
            fix="stage 3 is shard_module",
        )
    if model is None and stage != 1:
        raise PlanError(
            f"stage {stage} reduces gradients during backward and needs the model", fix="pass model=..."
        )
    if overlap_gather and model is None:
        raise PlanError("overlap_gather needs the model whose forward it overlaps with", fix="pass model=...")
    check_arguments(model, optimizer, what="shard_optimizer", whole=False)
    if mesh is None:
        check_alone("shard_optimizer", "pass the mesh of the ranks that share the parameters")
    if stage > 0 and getattr(optimizer, "boxed_state", None) is None:
        check_elementwise(optimizer)


def _check_split(precision: MixedPrecision, compression: Compression | None, stage: int) -> None:
    """Raise `PlanError` where the upper halves of master weights would not be the parameters, or not stay."""
    if not precision.split_master:
        return
    if stage == 3:
        raise PlanError(
            "master weights in halves need parameters that stay",
            cause="stage 3 frees them after each use",
            fix="shard_optimizer (stages 0 to 2), or split_master=False",
        )
    if compression is not None and compression.weights is not None:
        raise PlanError(
            "master weights in halves need parameters that are their upper halves",
            got=f"compressed weights ({compression.weights})",
            fix="Compression(weights=None), or split_master=False",
        )


def sharding_of(model: nn.Module) -> ModuleSharding:
    """The `ModuleSharding` that `shard_module` attached. Raises `PlanError` when there is none."""
    sharding = getattr(model, "cai_sharding", None)
    if sharding is None:
        raise PlanError("this model is not sharded", fix="call shard_module(model, mesh) first")
    return sharding


def no_sync(sharded: nn.Module | ShardedOptimizer) -> contextlib.AbstractContextManager[None]:
    """Backwards inside communicate no gradient; they add up and the next backward outside reduces them all.

    Args:
        sharded: a model of `shard_module` or an optimizer of `shard_optimizer`.
    """
    return sharding_of(sharded).no_sync() if isinstance(sharded, nn.Module) else sharded.no_sync()


def shard_module(
    model: nn.Module,
    mesh: AnyMesh | None,
    *,
    precision: MixedPrecision | None = None,
    residency: Residency | None = None,
    driver: Literal["hooks", "actions"] = "hooks",
    gather: Gather | None = None,
    materialize: Materialize | None = None,
    device: torch.device | str | None = None,
    compression: Compression | None = None,
) -> nn.Module:
    """Shard the parameters of a model over the data ranks of a mesh (ZeRO stage 3), in place; returns the model.

    Afterwards `model.named_parameters()` gives the same names, each parameter a 1-d tensor, its part of this rank's
    shard (some may be empty). Build an elementwise optimizer over them, or one of `cai_zero.optimizers`. Every
    block (an element of an `nn.ModuleList`), and every large embedding or linear layer outside blocks, is gathered
    before its forward and backward and freed after; gradients are reduced while backward runs and appear as `.grad` of
    the shards. Norms go through `cai_mesh.clip_grad_norm_`, checkpoints through `cai_mesh.checkpoint`.

    Args:
        model: parameters equal on all data ranks; or on the meta device, so that no rank ever holds all of it.
        mesh: see `cai_zero.reduction.ranks.RankTable`. None: one process.
        precision: dtypes of gathered parameters, of the shards and of the reduction.
        residency: the memory in which shards, their gradients and the state of their optimizer live between uses, such
            as `cai_gemini.ChunkResidency`. None: the device.
        driver: "hooks" gathers around every module call; "actions" leaves it to a pipeline schedule.
        gather: the times and means of gathering parameters.
        materialize: (name, meta parameter) -> its initial values, a tensor of the parameter's (local) shape. None:
            shards of meta parameters are NaN until a checkpoint is loaded into them.
        device: the device of the parameters of a meta model. Buffers are the caller's to materialize.
        compression: the tensors that travel in one byte an element.

    The model's own forward is a pass: what a rank's data skip in it is gathered and reduced all the same, so ranks
    may use different blocks. A block used out of the usual order must be used so by all ranks.

    Raises `PlanError` for parameters that cannot be sharded, for an unknown driver, and for a model sharded before.
    """
    if driver not in ("hooks", "actions"):
        raise PlanError("unknown driver of a sharded module", got=driver, expected="'hooks' or 'actions'")
    if getattr(model, "cai_sharding", None) is not None:
        raise PlanError("this model is already sharded")
    _check_split(precision or MixedPrecision(), compression, 3)
    check_arguments(model, what="shard_module")
    if mesh is None:
        check_alone("shard_module", "pass the mesh of the ranks that share the parameters")
    options = Options(
        precision or MixedPrecision(),
        residency or OnDevice(),
        driver,
        gather or Gather(),
        materialize,
        torch.device(device) if device is not None else None,
        compression or Compression(),
    )
    reduces_itself(model)
    model.cai_sharding = ModuleSharding(refresh(model), mesh, options)  # type: ignore[assignment]
    guard_state(model)
    follow_structure(model, _check_added)
    return model


def _check_added(model: nn.Module, new: list[str]) -> None:
    """Raise `PlanError` for parameters that a model of stage 3 was given later, and that are trained."""
    trained = [name for name in new if model.get_parameter(name).requires_grad]
    if trained:
        raise exchanged(model, trained[0])


def last_unsharded(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Leave what forwards without gradients inside use last unsharded until the next one, in stage 3.

    So their output may be asked for what needs the weights of the output layer. A pipeline's actions say themselves
    when weights come and go; a model that nobody has sharded has its own.
    """
    sharding: ModuleSharding | None = getattr(model, "cai_sharding", None)
    if sharding is None or sharding.driver == "actions":
        return contextlib.nullcontext()
    return sharding._gatherer.last_unsharded()


def unsharded(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Hold the whole weights on every rank, for forwards without gradients inside. Collective at both ends.

    In stage 3 all weights are gathered once; then each rank runs as many forwards as it likes, of its own data. A model
    whose weights nobody has sharded has them in any case.

    Raises:
        PlanError: a rank's GPU has no room for them, or a forward waits for its backward; inside, a forward is run for
            gradients.
    """
    sharding: ModuleSharding | None = getattr(model, "cai_sharding", None)
    if sharding is None:
        return contextlib.nullcontext()
    return hold(sharding._gatherer, sharding._lifecycle, sharding.ranks)
