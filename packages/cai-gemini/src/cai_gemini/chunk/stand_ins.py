"""Any optimizer's own `step` on stand-ins for its parameters.

A step runs in the background, or over what was read from a disk, while the parameters of the model are read by others.
So gradients are never put into them: an optimizer of the same kind is made for the step, whose parameters have the
values, gradients and state of the model's, perhaps in another memory.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


def step_stand_ins(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[tuple[dict[str, Any], Sequence[int]]],
    values: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    states: Mapping[int, dict[str, Any]],
) -> dict[int, dict[str, Any]]:
    """Step stand-ins for parameters, in place.

    Args:
        optimizer: the optimizer whose arithmetic it is; neither its parameters nor its state are touched.
        groups: hyperparameters, and the indices of parameters they are for.
        values: a parameter's value, which is stepped, and its gradient, by index.
        states: the state of those that have any, by index: tensors are changed in place or replaced.

    Returns the state afterwards, by index, of those that have any then.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    # hooks are for steps of the whole model
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_ins = {i: nn.Parameter(value) for i, (value, _) in values.items()}
    for i, (_, gradient) in values.items():
        stand_ins[i].grad = gradient
    twin.state = defaultdict(dict, {stand_ins[i]: dict(state) for i, state in states.items()})
    twin.param_groups = [{**group, "params": [stand_ins[i] for i in indices]} for group, indices in groups]
    inspect.unwrap(type(optimizer).step)(twin)
    return {i: dict(twin.state[param]) for i, param in stand_ins.items() if param in twin.state}
