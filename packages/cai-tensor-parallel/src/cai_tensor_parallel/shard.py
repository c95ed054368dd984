"""Cutting parameters: from a whole parameter to this rank's part, with its layout beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from cai_mesh.comm import ParallelMesh
from cai_mesh.layout import Replicate, Shard, attach, attach_to, layout_of, record_of


@dataclass
class Cutter:
    """Cuts parameters along one axis of a mesh, or several as if they were one; a shared parameter once.

    Args:
        axes: (name, degree, this rank's index) of the dimensions that play the axis, outermost first.
    """

    axes: tuple[tuple[str, int, int], ...]
    _done: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    @staticmethod
    def along(mesh: ParallelMesh, role: str) -> Cutter:
        """The cutter along an axis of a mesh."""
        return Cutter(tuple((name, mesh.degree(name), mesh.index(name)) for name in mesh.leaves(role)))

    @property
    def degree(self) -> int:
        """Number of parts."""
        return math.prod(degree for _, degree, _ in self.axes)

    def has_cut(self, whole: nn.Parameter) -> bool:
        """Whether `whole` is a parameter that has been replaced by its part."""
        return id(whole) in self._done

    def cut(self, module: nn.Module, name: str, placement: Shard | Replicate) -> nn.Parameter:
        """Replace parameter `name` of `module` by this rank's part and return it."""
        whole = module._parameters[name]
        assert whole is not None
        if id(whole) not in self._done:
            self._done[id(whole)] = (whole, self._part(whole, placement))
        part = self._done[id(whole)][1]
        module._parameters[name] = part
        attach_to(module, name)
        return part

    def _part(self, whole: nn.Parameter, placement: Shard | Replicate) -> nn.Parameter:
        layout = layout_of(whole).across(self.axes, placement)
        local = torch.empty(layout.local_shape, dtype=whole.dtype, device=whole.device)
        for index, box in layout.slices():
            local[index] = whole.detach()[box.slices()]
        part = nn.Parameter(local, requires_grad=whole.requires_grad)
        held = record_of(whole)
        attach(part, layout, name=held.name, reduce=held.reduce)
        return part
