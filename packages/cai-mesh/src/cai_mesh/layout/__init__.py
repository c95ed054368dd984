"""Which part of what a rank's tensor holds: layouts, boxes, chunks, and what is attached to a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_mesh._lazy import lazy

if TYPE_CHECKING:
    from cai_mesh.layout.attached import (
        FlatPart,
        Slice,
        Span,
        attach,
        attach_flat,
        attach_reduce,
        attach_slices,
        attach_spans,
        canonical_name,
        layout_of,
        reduce_of,
    )
    from cai_mesh.layout.boxed import BoxedTensor
    from cai_mesh.layout.boxes import Box, Piece
    from cai_mesh.layout.chunk import ALIGNMENT, FlatChunk, Overlap, Slot, moved
    from cai_mesh.layout.dtensor import placements_of
    from cai_mesh.layout.layout import Layout, Replicate, Shard, Step
    from cai_mesh.layout.reduce import ReduceSpec

__all__ = [
    "ALIGNMENT",
    "Box",
    "BoxedTensor",
    "FlatChunk",
    "FlatPart",
    "Layout",
    "Overlap",
    "Piece",
    "ReduceSpec",
    "Replicate",
    "Shard",
    "Slice",
    "Slot",
    "Span",
    "Step",
    "attach",
    "attach_flat",
    "attach_reduce",
    "attach_slices",
    "attach_spans",
    "canonical_name",
    "layout_of",
    "moved",
    "placements_of",
    "reduce_of",
]

__getattr__ = lazy(
    __name__,
    {
        "attached": (
            "FlatPart",
            "Slice",
            "Span",
            "attach",
            "attach_flat",
            "attach_reduce",
            "attach_slices",
            "attach_spans",
            "canonical_name",
            "layout_of",
            "reduce_of",
        ),
        "boxed": ("BoxedTensor",),
        "boxes": ("Box", "Piece"),
        "chunk": ("ALIGNMENT", "FlatChunk", "Overlap", "Slot", "moved"),
        "dtensor": ("placements_of",),
        "layout": ("Layout", "Replicate", "Shard", "Step"),
        "reduce": ("ReduceSpec",),
    },
)
