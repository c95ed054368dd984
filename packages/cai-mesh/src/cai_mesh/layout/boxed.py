"""One named value as the boxes of a global tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm.collectives import all_gather_object
from cai_mesh.errors import LayoutError
from cai_mesh.layout.boxes import Box
from cai_mesh.layout.layout import Layout
from cai_mesh.layout.record import canonical_name, layout_of, record_of, reduce_of, refresh


@dataclass(frozen=True)
class BoxedTensor:
    """Boxes of a global tensor and views of local memory that hold them; reading a checkpoint writes into the views.

    Args:
        global_shape: shape of the full tensor.
        dtype: element type.
        pieces: (region of the global tensor, view of exactly that shape).
        owner: whether this rank writes what several ranks hold (False for a tied copy).
        lend: a function for values that are not in memory: the views of `pieces` are on the meta device, and it returns
            the same boxes with views of memory, which may be read and written until something else is lent.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, torch.Tensor], ...]
    owner: bool = True
    lend: Callable[[], BoxedTensor] | None = None

    @property
    def present(self) -> BoxedTensor:
        """Boxes with values in memory: these, or what is lent."""
        return self if self.lend is None else self.lend()

    @staticmethod
    def from_param(tensor: torch.Tensor) -> BoxedTensor:
        """The boxes of a local tensor by its attached layout, of a DTensor's local part, or of a full tensor."""
        return BoxedTensor.like(tensor, tensor)

    @staticmethod
    def of_model(model: nn.Module) -> dict[str, BoxedTensor]:
        """The boxes of every parameter by canonical name, of replaced ones (`fully_shard`) as modules record them."""
        named = refresh(model).named_parameters()
        return {canonical_name(name, param): BoxedTensor.from_param(param) for name, param in named}

    @staticmethod
    def like(param: torch.Tensor, value: torch.Tensor) -> BoxedTensor:
        """The boxes of `value`, a tensor laid out as `param` is (an optimizer's moment, a gradient)."""
        owner = reduce_of(param).owner
        local = value.detach()
        if hasattr(local, "to_local"):
            local = local.to_local()
        slices = record_of(param).slices
        if slices is not None and len(slices) != 1:
            raise LayoutError(
                "a flat tensor of several parameters is not one value", got=[part.name for part in slices]
            )
        if slices is not None:
            boxed = BoxedTensor.from_flat(slices[0].layout, slices[0].range, local)
            return replace(boxed, owner=slices[0].owner)
        layout = layout_of(param)
        if local.dim() == 1:  # a gradient that is shown has its part flat
            local = local.view(layout.local_shape)
        pieces = tuple((box, local[index]) for index, box in layout.slices())
        return BoxedTensor(layout.global_shape, value.dtype, pieces, owner)

    @staticmethod
    def from_flat(layout: Layout, flat_range: tuple[int, int], flat: torch.Tensor) -> BoxedTensor:
        """The boxes of elements `flat_range` of a row-major local tensor, held in the 1-d tensor `flat`."""
        pieces = tuple((piece.box, piece.view(flat)) for piece in layout.boxes(flat_range))
        return BoxedTensor(layout.global_shape, flat.dtype, pieces)

    def to_full(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The full tensor, on the CPU, from the boxes of every rank of `group` (None: of this rank alone).

        For tests and small exports: the boxes travel as objects. Elements that no rank holds are NaN (0 for integers).
        """
        full = torch.zeros(self.global_shape, dtype=self.dtype)
        if full.is_floating_point():
            full.fill_(float("nan"))
        mine = [(box, view.detach().cpu()) for box, view in self.present.pieces]
        for pieces in all_gather_object(mine, group):
            for box, values in pieces:
                full[box.slices()] = values
        return full
