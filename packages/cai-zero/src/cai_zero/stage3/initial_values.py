"""The device of the parameters of a model of stage 3, and their first values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import FlatChunk
from cai_mesh.storage import check_there

Materialize = Callable[[str, nn.Parameter], torch.Tensor]


def device_of(param: torch.Tensor, device: torch.device | None) -> torch.device:
    """Return the device on which a model of such parameters runs. Raises `PlanError` where that is nowhere."""
    if device is None and param.is_meta:
        raise PlanError("a model on the meta device needs to be told where to go", fix="pass device=...")
    target = device or param.device
    check_there(target)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def fill(
    chunk: FlatChunk, full: torch.Tensor, members: list[tuple[str, nn.Parameter]], make: Materialize | None
) -> None:
    """Initial values of an unsharded chunk; NaN for meta parameters whose values are still to be loaded."""
    for view, (name, param) in zip(chunk.views(full), members, strict=True):
        if not param.is_meta:
            view.copy_(param.detach())
        elif make is not None:
            view.copy_(make(name, param))
        else:
            view.fill_(float("nan"))
