"""Wrappers that take ranks with different parts of a model for copies of it are refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from cai_mesh.comm import ParallelMesh
from cai_mesh.errors import PlanError

KINDS = {"tp": "tensor-parallel", "ep": "expert-parallel"}
_BESIDE = (
    " of a mesh with an axis dp beside tp; without data ranks, no wrapper. transformers' Trainer: "
    "cai_zero.integrations.transformers.ZeroTrainer(..., stage=0, mesh=mesh)"
)
_ZERO = "no wrapper: cai_zero.shard_optimizer, or shard_module, with the mesh that has the expert view"
RIGHT = {
    "tp": ("process_group=mesh['dp'].get_group()" + _BESIDE, "mesh=mesh['dp']" + _BESIDE),
    "ep": (_ZERO, _ZERO),
}
"""What to do in place of `DistributedDataParallel`, and of `fully_shard`, by axis."""


def guard_wrapping(model: nn.Module, mesh: ParallelMesh, axis: str = "tp") -> None:
    """Let a forward raise `PlanError` where torch averages gradients, or shards parameters, over the ranks of an axis.

    `DistributedDataParallel` and `fully_shard` do so by default: over all ranks. Over the data ranks they are right for
    `tp`; for `ep`, whose ranks are data ranks, they never are.
    """
    group, right = mesh.group(axis), RIGHT[axis]
    assert group is not None  # more than one rank
    other_ranks = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}

    def check(model: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and other_ranks & set(dist.get_process_group_ranks(wrapper.process_group)):
            raise _refusal(model, "DistributedDataParallel", axis, right[0])
        over = _sharded_over(model)
        if over is not None and other_ranks & set(over.mesh.flatten().tolist()):
            raise _refusal(model, "fully_shard", axis, right[1])

    model.register_forward_pre_hook(check)


def _sharded_over(model: nn.Module) -> DeviceMesh | None:
    """The ranks over which torch has sharded a model's parameters, those of a model without units unsharded by now."""
    for param in model.parameters():
        if hasattr(param, "device_mesh"):
            return param.device_mesh  # type: ignore[no-any-return]
    state = getattr(model, "_get_fsdp_state", lambda: None)()
    return getattr(getattr(getattr(state, "_fsdp_param_group", None), "mesh_info", None), "mesh", None)


def _refusal(model: nn.Module, wrapper: str, axis: str, right: str) -> PlanError:
    return PlanError(
        f"{wrapper} takes the {KINDS[axis]} ranks of {type(model).__name__} for copies of it",
        cause="its group has ranks with different parts of the model: their gradients would be averaged",
        fix=right,
    )
