"""Whole weights for files and from files, with the precision of master weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cai_zero import full_state_dict, load_full_state_dict


def whole_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> OrderedDict[str, Any]:
    """Return the full state dict on rank 0, of master weights where the optimizer has some. Collective."""
    weights = getattr(optimizer, "weights", None)
    return OrderedDict(full_state_dict(model, weights=None if weights is None else weights()))


def load_whole_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> None:
    """Fill parameters and master weights from a full state dict, read on rank 0. Collective.

    Raises as `load_full_state_dict`.
    """
    weights = getattr(optimizer, "weights", None)
    load_full_state_dict(model, state, weights=None if weights is None else weights())
    if weights is not None:
        optimizer.publish()  # type: ignore[union-attr]
