"""The state of an optimizer over pieces of chunks, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cai_mesh.layout import BoxedTensor
from cai_zero.replicated.chunks import Chunk
from cai_zero.state import own_boxes, state_slots


def state_of_pieces(optimizer: torch.optim.Optimizer, chunks: Iterable[Chunk]) -> dict[str, BoxedTensor]:
    """State (`NAME.SLOT`) of an optimizer over the pieces of chunks (stages 0 to 2), as views."""
    state: dict[str, BoxedTensor] = {}
    for chunk in chunks:
        for name, piece, part in zip(chunk.chunk.names, chunk.weights.pieces, chunk.slices, strict=True):
            boxes = own_boxes(optimizer, piece)
            if boxes is None:
                slots = state_slots(optimizer, piece)
                boxes = {
                    f"{name}.{s}": chunk.boxed_slot(t, piece, part.start, name) for s, t in slots.items()
                }
            state.update({key: value for key, value in boxes.items() if value is not None})
    return state
