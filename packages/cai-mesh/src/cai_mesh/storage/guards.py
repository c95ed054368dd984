"""Checks of a model and an optimizer before their parameters move, and of what must not step them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cai_mesh.errors import PlanError
from cai_mesh.gradients.gradient_views.flat_use import MovedParameter
from cai_mesh.gradients.gradient_views.parameters import ShardParameter, ShownParameter, is_kept


def check_arguments(model: Any, optimizer: Any = None, *, what: str, whole: bool = True) -> None:
    """Raise `PlanError` for arguments of other kinds, in the other order, or that have been given before.

    Args:
        model, optimizer: None where the function takes none, or may go without.
        what: the function's name.
        whole: whether all of the model moves; else what the optimizer has.
    """
    for value, kind, name in ((model, nn.Module, "model"), (optimizer, torch.optim.Optimizer, "optimizer")):
        if value is not None and not isinstance(value, kind):
            raise PlanError(
                f"{what} was given something else as its {name}",
                got=type(value).__name__,
                expected=f"a torch {kind.__name__}",
                fix="see its signature for the order of arguments",
            )
    if getattr(optimizer, "inner", None) is not None:
        raise PlanError(f"{what} was given an optimizer that is sharded or offloaded already")
    params = [] if model is None else list(model.parameters())
    if optimizer is not None and not whole:
        # another optimizer may have others of the model, but not in flat parts
        params = [param for param in params if type(param) is not ShownParameter]
        params += [param for group in optimizer.param_groups for param in group["params"]]
    if any(is_kept(param) for param in params):
        raise PlanError(
            f"{what} was given parameters that are sharded or offloaded already",
            fix="do it once; to change it, build the model anew and load its weights",
        )


def check_alone(what: str, fix: str) -> None:
    """Raise `PlanError` where there are several ranks, and nothing says how they share the work: they would diverge."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise PlanError(
            f"{what} among {dist.get_world_size()} ranks has no mesh",
            cause="every rank would train a model of its own, on its own data",
            fix=fix,
        )


def check_there(device: torch.device) -> None:
    """Raise `PlanError` for a device that this process does not have."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            "there is no CUDA device in this process",
            got=str(device),
            cause="no GPU, a torch without CUDA, or CUDA_VISIBLE_DEVICES",
            fix='device="cpu", or a machine with a GPU',
        )


class _NotForDDP:
    """The attribute that DistributedDataParallel asks a module for before it does anything else."""

    def __iter__(self) -> Iterator[str]:
        raise PlanError(
            "DistributedDataParallel was given a model whose gradients are reduced already",
            cause="accelerator.prepare(model), Trainer and Fabric wrap the model they are given",
            fix="hand model and optimizer over through cai_zero.integrations (accelerate.prepare, "
            "transformers.ZeroTrainer, fabric.ZeroStrategy)",
        )


def reduces_itself(model: nn.Module) -> None:
    """Let torch's DistributedDataParallel refuse the model from now on: it would reduce its gradients again."""
    model._ddp_params_and_buffers_to_ignore = _NotForDDP()  # type: ignore[assignment]


# -- optimizers ----------------------------------------------------------------------------------------------------


def mark_moved(param: torch.Tensor) -> None:
    """Remember of a parameter that another one is trained in its place."""
    param.cai_moved = True  # type: ignore[attr-defined]
    if type(param) is nn.Parameter:
        param.__class__ = MovedParameter


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of an optimizer whose parameters others step: it would train nothing, or ranks apart."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(getattr(p, "cai_moved", False) for p in params):
        raise PlanError(
            "the optimizer holds parameters that have been sharded since it was built",
            cause="shard_module puts others in their place; these would never change",
            fix="build the optimizer on model.parameters() after shard_module",
        )
    shown_params = (p for p in params if isinstance(p, ShownParameter) and not isinstance(p, ShardParameter))
    if getattr(optimizer, "inner", None) is None and any(is_kept(p) for p in shown_params):
        raise PlanError(
            "an optimizer steps parameters that a sharded optimizer has",
            cause="the ranks would not share its step",
            fix="call step() of what shard_optimizer returned; leave other optimizers out",
        )


register_optimizer_step_pre_hook(_check_step)
