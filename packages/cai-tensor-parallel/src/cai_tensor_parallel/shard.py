"""Cutting parameters: from a whole parameter to this rank's part, with its layout beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from cai_mesh.layout import Replicate, Shard, attach, attach_reduce, layout_of, reduce_of


@dataclass
class Cutter:
    """Cuts parameters along one mesh axis, a shared parameter once.

    Args:
        axis: name of the mesh axis.
        degree, index: its size and this rank's position on it.
    """

    axis: str
    degree: int
    index: int
    _done: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def cut(self, module: nn.Module, name: str, placement: Shard | Replicate) -> nn.Parameter:
        """Replace parameter `name` of `module` by this rank's part and return it."""
        whole = module._parameters[name]
        assert whole is not None
        if id(whole) not in self._done:
            self._done[id(whole)] = (whole, self._part(whole, placement))
        part = self._done[id(whole)][1]
        module._parameters[name] = part
        return part

    def _part(self, whole: nn.Parameter, placement: Shard | Replicate) -> nn.Parameter:
        layout = layout_of(whole).then(self.axis, self.degree, self.index, placement)
        local = torch.empty(layout.local_shape, dtype=whole.dtype, device=whole.device)
        for index, box in layout.slices():
            local[index] = whole.detach()[box.slices()]
        part = nn.Parameter(local, requires_grad=whole.requires_grad)
        attach(part, layout)
        attach_reduce(part, reduce_of(whole))
        if getattr(whole, "cai_name", None):
            part.cai_name = whole.cai_name  # type: ignore[attr-defined]
        return part
