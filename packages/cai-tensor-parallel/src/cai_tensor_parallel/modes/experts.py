"""Modules whose cut parameters make one rank's part of a sum, as experts cut by hidden features.

What comes in is whole on every rank, hidden states and routing weights alike: each rank computes a part of the sum from
it, so its gradients are parts of a sum, too, and are summed once. The module's own forward stays.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import copy_to, reduce_from
from cai_mesh.errors import PlanError
from cai_tensor_parallel.modes.context import ModeContext


def sum_parts(module: nn.Module, context: ModeContext) -> None:
    """Sum what a module returns over the ranks, and in backward the gradients of the tensors it is given.

    Biases that are whole are added on one rank only. Raises `PlanError` for other parameters that are whole: nothing
    says what they are applied to.
    """
    params = {name: p for name, p in module._parameters.items() if p is not None}
    once = [name for name, p in params.items() if not context.cutter.is_part(p)]
    inside = [name for name, _ in module.named_parameters() if "." in name]
    strange = [name for name in once if not name.endswith("bias")] + inside
    if strange:
        raise PlanError(
            f"{context.module_name} is to make parts of a sum, and has parameters that are not cut",
            got=", ".join(strange),
            expected="parameters that are cut by roles of their own, and biases that are added last",
            fix="give them roles, or leave the module whole",
        )
    original, group, first = module.forward, context.group, context.group.rank() == 0

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_entering(value, group) for value in args)
        kwargs = {name: _entering(value, group) for name, value in kwargs.items()}
        biases = {name: self._parameters[name] for name in once}
        self._parameters.update({name: _on_one(p, group, first) for name, p in biases.items()})
        try:
            part = original(*args, **kwargs)
        finally:
            self._parameters.update(biases)
        if not isinstance(part, torch.Tensor):
            raise PlanError(
                "a module that makes parts of a sum returned something else",
                got=type(part).__name__,
                expected="one tensor",
            )
        return reduce_from(part, group)

    module.forward = types.MethodType(forward, module)


def count_once(module: nn.Module, context: ModeContext) -> None:
    """Let a module inside one that makes parts of a sum return what it does on one rank, and zeros on the others."""
    original, first = module.forward, context.group.rank() == 0

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = original(*args, **kwargs)
        return output if first else torch.zeros_like(output)

    module.forward = types.MethodType(forward, module)


def _entering(value: Any, group: dist.ProcessGroup) -> Any:
    return copy_to(value, group) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _on_one(param: torch.Tensor, group: dist.ProcessGroup, first: bool) -> torch.Tensor:
    """The parameter on one rank and zeros on the others; every rank gets the whole gradient."""
    return copy_to(param, group) * float(first)
