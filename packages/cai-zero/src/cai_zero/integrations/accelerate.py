"""Hugging Face accelerate around a model that is sharded or offloaded already."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load_state_dict
from torch import nn

from cai_zero import full_optimizer_state_dict, load_full_optimizer_state_dict
from cai_zero.integrations import sync_of
from cai_zero.integrations.whole import load_whole_weights, whole_weights


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *extras: Any
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, *extras)` for what is sharded or offloaded already.

    The model is neither wrapped nor moved, the optimizer's state stays where it is, and `accelerator.accumulate(model)`
    lets all but the last microbatch of a step only accumulate. `accelerator.backward`, `clip_grad_norm_`,
    `clip_grad_value_` and schedules work as ever.

    `accelerator.save_model`, `save_state` and `get_state_dict`, and the state dict of the prepared optimizer, have
    whole tensors on the main process, so all processes call them; `load_state` takes them on any number of ranks and in
    any stage.

    Args:
        extras: data loaders and schedules, prepared as ever.

    Returns the model, the prepared optimizer and the extras, in the order of the arguments.
    """
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    sync = sync_of(model, optimizer)
    if sync is not None:
        model.no_sync = sync.defer  # type: ignore[assignment]
    prepared = accelerator.prepare_optimizer(optimizer, device_placement=False)
    prepared.state_dict = partial(full_optimizer_state_dict, optimizer, model)
    prepared.load_state_dict = partial(load_full_optimizer_state_dict, optimizer, model)
    _States.of(accelerator).optimizers[model] = optimizer
    rest = accelerator.prepare(*extras) if extras else ()
    return model, prepared, *(rest if isinstance(rest, (tuple, list)) else (rest,))


class _States:
    """What an accelerator saves and loads of its models: whole tensors.

    Args:
        accelerator: the accelerator, one object of this class each.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.optimizers = accelerator, dict[nn.Module, torch.optim.Optimizer]()
        self.plain = accelerator.get_state_dict
        accelerator.get_state_dict = self.get_state_dict  # type: ignore[method-assign]
        accelerator.register_load_state_pre_hook(self.load)
        accelerator.cai_states = self

    @staticmethod
    def of(accelerator: Accelerator) -> _States:
        return getattr(accelerator, "cai_states", None) or _States(accelerator)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        inner = self.accelerator.unwrap_model(model)
        if inner not in self.optimizers:
            return self.plain(model, unwrap)
        return whole_weights(inner, self.optimizers[inner])

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the files of all models, and leave none to accelerate, which would load them one by one on each rank."""
        for number, model in enumerate(models):
            ending = f"_{number}" if number else ""
            safe = Path(input_dir, f"model{ending}.safetensors")
            file = safe if safe.exists() else Path(input_dir, f"pytorch_model{ending}.bin")
            state = load_state_dict(str(file)) if self.accelerator.is_main_process else {}
            inner = self.accelerator.unwrap_model(model)
            load_whole_weights(inner, self.optimizers.get(inner), state)
        models.clear()
