"""What `split` tries itself on before it changes a model: a small model of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Trial:
    """A small model for `split(model, mesh, trial=...)`, for models that are not causal LMs of transformers.

    Its layers and what lies around them must have the names of the large model's; sizes and the number of layers may
    be small. It is run in float64 on the CPU, in evaluation mode.

    Args:
        build: a small instance, with the same values at every call.
        inputs: keyword arguments of its forward, floating-point tensors in float64; the same at every call.
        loss: of what the forward returns: a scalar that depends on all parameters.
        layers: name of the `nn.ModuleList` of layers between which the model is split. A layer gets the hidden states
            as its first argument or as `hidden_states`, and returns them, alone or first in a tuple.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]
    loss: Callable[[Any], torch.Tensor]
    layers: str
