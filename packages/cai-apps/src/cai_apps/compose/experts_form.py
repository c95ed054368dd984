"""The form in which transformers computes the experts of a model: its grouped products have no float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

GROUPED = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes in which torch multiplies rows by groups."""


def let_experts_compute(model: nn.Module, dtype: torch.dtype) -> None:
    """Let experts be multiplied one after the other where a dtype has no grouped product, in place.

    It is the form that transformers calls eager, and the one its classes are written in. The model has a config of its
    own from then on: others may be made of the one that it shared.
    """
    if dtype in GROUPED:
        return
    copies = dict[int, Any]()
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            own_config: Any = copy.deepcopy(config, copies)
            own_config._experts_implementation = "eager"
            module.config = own_config
