"""No file holds one rank's part of a model under the name of the whole: writing one is refused."""

from __future__ import annotations

import types
from typing import Any, NoReturn

import torch
from torch import nn

from cai_mesh.errors import CheckpointError
from cai_mesh.layout import layout_of


def guard_saving(model: nn.Module) -> None:
    """Let `save_pretrained`, and pickling of cut tensors of the model's `state_dict`, raise `CheckpointError`.

    `save_pretrained` with a `state_dict` of whole tensors writes these.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = types.MethodType(_save_whole, model)  # type: ignore[assignment]
    for module in model.modules():
        if any(p is not None and _is_cut(p) for p in module._parameters.values()):
            module.register_state_dict_post_hook(_mark)


def _save_whole(model: nn.Module, *args: Any, state_dict: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    shapes = {
        name: layout_of(param).global_shape for name, param in model.named_parameters() if _is_cut(param)
    }
    if state_dict is None or any(state_dict[n].shape != shapes[n] for n in shapes.keys() & state_dict.keys()):
        _refuse()
    save: Any = type(model).save_pretrained
    return save(model, *args, state_dict=state_dict, **kwargs)


def _is_cut(param: torch.Tensor) -> bool:
    return layout_of(param).global_shape != tuple(param.shape)


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, param in module._parameters.items():
        entry = state.get(prefix + name)
        if param is not None and entry is not None and entry is not param and _is_cut(param):
            entry.__reduce_ex__ = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise CheckpointError(
        "this rank holds parts of the parameters, and a file of them would pass for the whole model",
        cause="the model is parallelized over ranks",
        fix="on all ranks: cai_mesh.checkpoint.save_hf(model, directory) writes whole tensors, "
        "cai_mesh.checkpoint.save(directory, BoxedTensor.of_model(model), step=...) what any layout loads",
    )
