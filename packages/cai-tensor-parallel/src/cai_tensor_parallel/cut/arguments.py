"""Tensors that come to a module for all heads, and of which a rank that has some of the heads takes its part."""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import copy_to
from cai_mesh.errors import PlanError
from cai_tensor_parallel.plans.plan import Plan


def cut_arguments(model: nn.Module, plan: Plan, group: dist.ProcessGroup) -> None:
    """Let modules take their rank's heads of the arguments that `plan.arguments` names, as "alibi:0:num_heads" does.

    To be called before the attributes of the plan are divided. Raises `PlanError` for a module without such an
    attribute or argument, and for heads that do not divide over the ranks.
    """
    for name, module in model.named_modules():
        for glob, texts in plan.arguments.items():
            if fnmatch.fnmatchcase(name, glob):
                for text in texts:
                    _cut_argument(module, name, text, group)


def _cut_argument(module: nn.Module, name: str, text: str, group: dist.ProcessGroup) -> None:
    argument, _, rest = text.partition(":")
    dim, _, attribute = rest.partition(":")
    signature = inspect.signature(module.forward)
    heads = getattr(module, attribute, None)
    if argument not in signature.parameters or not isinstance(heads, int) or not dim.lstrip("-").isdigit():
        raise PlanError(
            f"{name} has no argument to cut by heads",
            got=text,
            expected="argument:dim:attribute, of its forward and an integer attribute of it that counts heads",
        )
    if heads % group.size():
        raise PlanError(
            f"{name}: its heads do not divide",
            got=f"{heads} heads over {group.size()} ranks",
            fix="choose a tensor-parallel degree that divides them",
        )

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if argument in kwargs:
            return args, kwargs | {argument: part_of_heads(kwargs[argument], int(dim), heads, group)}
        bound = signature.bind_partial(*args, **kwargs)
        bound.arguments[argument] = part_of_heads(bound.arguments.get(argument), int(dim), heads, group)
        return bound.args, bound.kwargs

    module.register_forward_pre_hook(take, with_kwargs=True)


def part_of_heads(x: Any, dim: int, heads: int, group: dist.ProcessGroup) -> Any:
    """This rank's heads of a tensor whose dim `dim` counts heads, or anything times heads with the heads inside.

    Backward sums the gradients of all ranks, each of its own heads. None stays None, and a size of 1 stays.
    """
    if x is None or x.shape[dim] == 1:
        return x
    apart = copy_to(x, group).unflatten(dim, (-1, heads))
    inner = dim + 1 if dim >= 0 else dim
    part = heads // group.size()
    local_heads = apart.narrow(inner, group.rank() * part, part)
    return torch.flatten(local_heads, inner - 1, inner)
