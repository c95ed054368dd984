"""Any optimizer's own `step` on parameters and state that lie elsewhere than the model's."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


def step_apart(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[tuple[dict[str, Any], Sequence[int]]],
    values: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    states: Mapping[int, dict[str, Any]],
) -> dict[int, dict[str, Any]]:
    """Step stand-ins for parameters, in place.

    Args:
        optimizer: whose arithmetic it is; neither its parameters nor its state are touched.
        groups: hyperparameters, and the indices of parameters they are for.
        values: by index, a parameter's value, which is stepped, and its gradient.
        states: by index, its state: tensors are changed in place or replaced.

    Returns the state afterwards, by index.
    """
    part = copy.copy(optimizer)
    stand_ins = {i: nn.Parameter(value) for i, (value, _) in values.items()}
    for i, (_, gradient) in values.items():
        stand_ins[i].grad = gradient
    part.state = defaultdict(dict, {stand_ins[i]: dict(state) for i, state in states.items() if i in values})
    part.param_groups = [{**group, "params": [stand_ins[i] for i in indices]} for group, indices in groups]
    inspect.unwrap(type(optimizer).step)(part)
    return {i: dict(part.state[param]) for i, param in stand_ins.items()}
