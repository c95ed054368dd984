"""The signature of what a rank keeps: which parts of which parameters, as one line that travels with saved state.

State of parts has the shapes of another rank's as often as not. What a rank saves is signed, and whoever loads it
compares: state of other parts is refused before it changes anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from cai_mesh.errors import CheckpointError
from cai_mesh.layout.layout import Layout, Shard
from cai_mesh.layout.record import layout_of, record_of

SIGNATURE = "cai_part"
"""The key under which state of parts has its signature: in param groups, and in the metadata of state dicts."""


def extent_of(tensor: torch.Tensor) -> tuple[Layout, tuple[int, int]]:
    """Return the layout of a parameter and the elements of its local tensor that a tensor holds of it."""
    slices = record_of(tensor).slices
    if slices:
        return slices[0].layout, slices[0].range
    layout = layout_of(tensor)
    return layout, (0, tensor.numel())


def signature_of(named: Iterable[tuple[str, torch.Tensor]], chunks: Iterable[int] = ()) -> str:
    """Return the signature of tensors: of the parts they hold, and the rank they are on, which is for a reader alone.

    Ranks that hold copies of the same parts have the same one, as `same_parts` compares them.

    Args:
        named: the tensors, each with the name or number that it is known by.
        chunks: sizes of the buffers that they lie in, where these are saved.
    """
    digest = hashlib.sha256()
    for name, tensor in named:
        layout, (low, high) = extent_of(tensor)
        cuts = [step for step in layout.steps if isinstance(step.placement, Shard)]
        digest.update(repr((name, layout.global_shape, cuts, (low, high) if low < high else None)).encode())
    digest.update(repr(list(chunks)).encode())
    ranked = dist.is_available() and dist.is_initialized()
    rank, count = (dist.get_rank(), dist.get_world_size()) if ranked else (0, 1)
    return f"{digest.hexdigest()[:16]} (rank {rank} of {count})"


def same_parts(signature: str, other: str) -> bool:
    """Whether two signatures are of the same parts."""
    return signature.split(" ")[0] == other.split(" ")[0]


def check_signature(what: str, got: str | None, expected: str, fix: str) -> None:
    """Raise `CheckpointError` where state is signed by other parts than it is loaded for, or not at all."""
    if got is None or not same_parts(got, expected):
        raise CheckpointError(
            f"{what} is not of the parts that this rank has",
            got="no signature" if got is None else got,
            expected=expected,
            cause="each rank has state of its own: another rank's was loaded, or that of another model, another "
            "number of ranks or another layout",
            fix=fix,
        )
