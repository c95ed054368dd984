"""One named value as the boxes of a global tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cai_mesh.collectives import all_gather_object
from cai_mesh.layout import Box, Layout
from cai_mesh.reduce import ReduceSpec


@dataclass(frozen=True)
class FlatPart:
    """A 1-d tensor that is elements `range` of the row-major local tensor described by `layout`."""

    layout: Layout
    range: tuple[int, int]


def attach_flat(tensor: torch.Tensor, layout: Layout, flat_range: tuple[int, int]) -> None:
    """Say of which elements of which local tensor a 1-d tensor is a part."""
    tensor.cai_flat = FlatPart(layout, flat_range)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Slice:
    """What a flat tensor of several parameters holds of one of them.

    Args:
        name: canonical name of the parameter.
        layout: of the local tensor.
        range: elements of the row-major local tensor that are held; may be empty.
        start: element of the flat tensor at which they begin.
        axes: mesh axes along which ranks hold different elements of the parameter.
        owner: whether this copy is the one that is written to checkpoints.
    """

    name: str
    layout: Layout
    range: tuple[int, int]
    start: int
    axes: frozenset[str]
    owner: bool = True


def attach_slices(flat: torch.Tensor, slices: Sequence[Slice]) -> None:
    """Say what a flat tensor holds of every parameter of its chunk, in an order that is the same on all ranks."""
    flat.cai_slices = tuple(slices)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BoxedTensor:
    """Boxes of a global tensor and views of local memory that hold them; reading a checkpoint writes into the views.

    Args:
        global_shape: shape of the whole.
        dtype: element type.
        pieces: (region of the global tensor, view of exactly that shape).
        owner: whether this rank writes what several ranks hold (False for a tied copy).
        lend: for values that are not in memory: the views of `pieces` are on the meta device, and this returns the same
            boxes with views of memory, which may be read and written until something else is lent.
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
        """The boxes of a local tensor by its attached layout, of a DTensor's local part, or of a whole tensor."""
        return BoxedTensor.like(tensor, tensor)

    @staticmethod
    def like(param: torch.Tensor, value: torch.Tensor) -> BoxedTensor:
        """The boxes of `value`, a tensor laid out as `param` is (an optimizer's moment, a gradient)."""
        owner = ReduceSpec.of(param).owner
        local = value.detach()
        if hasattr(local, "to_local"):
            local = local.to_local()
        flat = getattr(param, "cai_flat", None)
        if flat is not None:
            boxed = BoxedTensor.from_flat(flat.layout, flat.range, local)
            return replace(boxed, owner=owner)
        layout = Layout.of(param)
        pieces = tuple((box, local[index]) for index, box in layout.slices())
        return BoxedTensor(layout.global_shape, value.dtype, pieces, owner)

    @staticmethod
    def from_flat(layout: Layout, flat_range: tuple[int, int], flat: torch.Tensor) -> BoxedTensor:
        """The boxes of elements `flat_range` of a row-major local tensor, held in the 1-d tensor `flat`."""
        pieces = tuple((piece.box, piece.view(flat)) for piece in layout.boxes(flat_range))
        return BoxedTensor(layout.global_shape, flat.dtype, pieces)

    def to_full(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The whole tensor, on the CPU, from the boxes of every rank of `group` (None: of this rank alone).

        For tests and small exports: the boxes travel as objects. Elements that no rank holds are NaN (0 for integers).
        """
        full = torch.zeros(self.global_shape, dtype=self.dtype)
        if full.is_floating_point():
            full.fill_(float("nan"))
        mine = [(box, view.detach().cpu()) for box, view in self.present.pieces]
        for held in all_gather_object(mine, group):
            for box, values in held:
                full[box.slices()] = values
        return full
