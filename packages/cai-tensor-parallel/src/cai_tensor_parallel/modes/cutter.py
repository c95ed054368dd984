"""Cutting parameters: from a whole parameter to this rank's part, with its layout beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from cai_mesh.comm import ParallelMesh
from cai_mesh.layout import Replicate, Shard, attach, attach_to, layout_of, record_of

Cuts = tuple[tuple[tuple[str, ...], Shard | Replicate], ...]
"""(axes, what is done along them), in order."""


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

    def _unnamed(self, cuts: Cuts) -> tuple[str, ...]:
        named = {name for names, _ in cuts for name in names}
        return tuple(name for name, _, _ in self.axes if name not in named)

    def has_cut(self, param: nn.Parameter) -> bool:
        """Whether `param` is a parameter that has been replaced by its part."""
        return id(param) in self._done

    def is_part(self, param: nn.Parameter) -> bool:
        """Whether `param` is a part that has replaced its parameter."""
        return any(part is param for _, part in self._done.values())

    def cut(self, module: nn.Module, name: str, placement: Shard | Replicate) -> nn.Parameter:
        """Replace parameter `name` of `module` by this rank's part and return it."""
        return self.place(module, name, ((tuple(axis for axis, _, _ in self.axes), placement),))

    def place(self, module: nn.Module, name: str, cuts: Cuts) -> nn.Parameter:
        """The same by several cuts, one after the other; ranks along axes that none names hold the same."""
        param = module._parameters[name]
        assert param is not None
        if id(param) not in self._done:
            self._done[id(param)] = (param, self._part(param, cuts))
        part = self._done[id(param)][1]
        module._parameters[name] = part
        attach_to(module, name)
        return part

    def _part(self, param: nn.Parameter, cuts: Cuts) -> nn.Parameter:
        layout = layout_of(param)
        for names, placement in (*cuts, (self._unnamed(cuts), Replicate())):
            layout = layout.across([axis for axis in self.axes if axis[0] in names], placement)
        local = torch.empty(layout.local_shape, dtype=param.dtype, device=param.device)
        for index, box in layout.slices():
            local[index] = param.detach()[box.slices()]
        part = nn.Parameter(local, requires_grad=param.requires_grad)
        record = record_of(param)
        attach(part, layout, name=record.name, reduce=record.reduce)
        return part
