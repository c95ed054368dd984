"""The parts that a rank's tensor holds of others: layouts, boxes, chunks, and what is attached to a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_mesh._lazy import lazy

if TYPE_CHECKING:
    from cai_mesh.layout.boxed import BoxedTensor
    from cai_mesh.layout.boxes import Box, Piece
    from cai_mesh.layout.chunk import ALIGNMENT, FlatChunk, Overlap, Slot, moved
    from cai_mesh.layout.dtensor import placements_of
    from cai_mesh.layout.layout import Layout, Replicate, Shard, Step
    from cai_mesh.layout.record import (
        Record,
        Slice,
        attach,
        attach_to,
        canonical_name,
        keep_attached,
        layout_of,
        parts_by_axes,
        record_of,
        reduce_of,
        refresh,
        sites,
    )
    from cai_mesh.layout.reduce import ReduceSpec
    from cai_mesh.layout.signature import SIGNATURE, check_signature, extent_of, same_parts, signature_of
    from cai_mesh.layout.writes import count_writes, note_writes

__all__ = [
    "ALIGNMENT",
    "SIGNATURE",
    "Box",
    "BoxedTensor",
    "FlatChunk",
    "Layout",
    "Overlap",
    "Piece",
    "Record",
    "ReduceSpec",
    "Replicate",
    "Shard",
    "Slice",
    "Slot",
    "Step",
    "attach",
    "attach_to",
    "canonical_name",
    "check_signature",
    "count_writes",
    "extent_of",
    "keep_attached",
    "layout_of",
    "moved",
    "note_writes",
    "parts_by_axes",
    "placements_of",
    "record_of",
    "reduce_of",
    "refresh",
    "same_parts",
    "signature_of",
    "sites",
]

__getattr__ = lazy(
    __name__,
    {
        "boxed": ("BoxedTensor",),
        "boxes": ("Box", "Piece"),
        "chunk": ("ALIGNMENT", "FlatChunk", "Overlap", "Slot", "moved"),
        "dtensor": ("placements_of",),
        "layout": ("Layout", "Replicate", "Shard", "Step"),
        "record": (
            "Record",
            "Slice",
            "attach",
            "attach_to",
            "canonical_name",
            "keep_attached",
            "layout_of",
            "parts_by_axes",
            "record_of",
            "reduce_of",
            "refresh",
            "sites",
        ),
        "reduce": ("ReduceSpec",),
        "signature": ("SIGNATURE", "check_signature", "extent_of", "same_parts", "signature_of"),
        "writes": ("count_writes", "note_writes"),
    },
)
