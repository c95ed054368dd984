"""Parameters that ranks hold whole and apply to different activations."""

from __future__ import annotations

import types
from typing import Any

import torch.distributed as dist
from torch import nn

from cai_mesh.comm import copy_to
from cai_tensor_parallel.modes.cutter import Cutter


def sum_gradients(module: nn.Module, group: dist.ProcessGroup | None, cutter: Cutter | None = None) -> None:
    """Sum the gradients of a module's own parameters over a group; of those that `cutter` has cut not."""
    original = module.forward
    params = [(name, p) for name, p in module._parameters.items() if p is not None]
    names = [name for name, p in params if cutter is None or not cutter.is_part(p)]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        originals = {name: self._parameters[name] for name in names}
        self._parameters.update({name: copy_to(p, group) for name, p in originals.items()})
        try:
            return original(*args, **kwargs)
        finally:
            self._parameters.update(originals)

    module.forward = types.MethodType(forward, module)
