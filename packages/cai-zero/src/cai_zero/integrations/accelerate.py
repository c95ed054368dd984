"""Hugging Face accelerate around a model that is sharded or offloaded already."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from cai_zero.integrations import sync_of


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *extras: Any
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, *extras)` for what is sharded or offloaded already.

    The model is neither wrapped nor moved, the optimizer's state stays where it is, and `accelerator.accumulate(model)`
    lets all but the last microbatch of a step only accumulate. `accelerator.backward`, `clip_grad_norm_`,
    `clip_grad_value_` and schedules work as ever.

    Args:
        extras: data loaders and schedules, prepared as ever.

    Returns the model, the prepared optimizer and the extras, in the order of the arguments.
    """
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    sync = sync_of(model, optimizer)
    if sync is not None:
        model.no_sync = sync.defer  # type: ignore[assignment]
    prepared = accelerator.prepare_optimizer(optimizer, device_placement=False)
    rest = accelerator.prepare(*extras) if extras else ()
    return model, prepared, *(rest if isinstance(rest, (tuple, list)) else (rest,))
