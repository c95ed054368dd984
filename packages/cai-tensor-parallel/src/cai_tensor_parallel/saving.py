"""No file holds one rank's part of a model under the name of the whole: writing one is refused."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from cai_mesh.errors import CheckpointError
from cai_mesh.layout import layout_of


def guard_saving(model: nn.Module) -> None:
    """Let `save_pretrained`, and pickling of cut tensors of the model's `state_dict`, raise `CheckpointError`."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _refuse  # type: ignore[assignment]
    for module in model.modules():
        if any(p is not None and _is_cut(p) for p in module._parameters.values()):
            module.register_state_dict_post_hook(_mark)


def _is_cut(param: torch.Tensor) -> bool:
    return layout_of(param).global_shape != tuple(param.shape)


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, param in module._parameters.items():
        held = state.get(prefix + name)
        if param is not None and held is not None and held is not param and _is_cut(param):
            held.__reduce_ex__ = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise CheckpointError(
        "this rank holds parts of the parameters, and a file of them would pass for the whole model",
        cause="the model is parallelized over ranks",
        fix="on all ranks: cai_mesh.checkpoint.save_hf(model, directory) writes whole tensors, "
        "cai_mesh.checkpoint.save(directory, BoxedTensor.of_model(model), step=...) what any layout loads",
    )
