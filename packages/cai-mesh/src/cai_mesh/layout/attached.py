"""What is attached to a parameter: its layout, how its gradient is reduced, its name, and what a flat tensor holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cai_mesh.errors import LayoutError
from cai_mesh.layout.layout import Layout
from cai_mesh.layout.reduce import ReduceSpec


def attach(tensor: torch.Tensor, layout: Layout) -> None:
    """Put a layout beside a local tensor. Raises `LayoutError` when the shapes disagree."""
    if tuple(tensor.shape) != layout.local_shape:
        raise LayoutError(
            "a layout does not describe this tensor", got=tuple(tensor.shape), expected=layout.local_shape
        )
    tensor.cai_layout = layout  # type: ignore[attr-defined]


def canonical_name(name: str, tensor: torch.Tensor) -> str:
    """The name under which a parameter is saved and initialized: that of its owner when it is a tied copy."""
    return getattr(tensor, "cai_name", None) or name


def layout_of(tensor: torch.Tensor) -> Layout:
    """The attached layout of a tensor, that of a DTensor, or the whole tensor."""
    attached = getattr(tensor, "cai_layout", None)
    if attached is not None:
        return attached
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        from cai_mesh.layout.dtensor import layout_of_dtensor

        return layout_of_dtensor(tensor)
    return Layout(tuple(tensor.shape))


def reduce_of(tensor: torch.Tensor) -> ReduceSpec:
    """The attached reduce spec of a tensor, or the default one."""
    return getattr(tensor, "cai_reduce", None) or ReduceSpec()


def attach_reduce(tensor: torch.Tensor, spec: ReduceSpec) -> None:
    """Put a reduce spec beside a parameter."""
    tensor.cai_reduce = spec  # type: ignore[attr-defined]


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
class Span:
    """Elements [start, stop) of a flat parameter whose values differ along `axes` and count once if `owner`."""

    start: int
    stop: int
    axes: frozenset[str]
    owner: bool = True


def attach_spans(param: torch.Tensor, spans: Sequence[Span]) -> None:
    """Say which elements of a flat parameter differ along which mesh axes (a chunk holds several layouts)."""
    param.cai_spans = tuple(spans)  # type: ignore[attr-defined]
