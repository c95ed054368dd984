"""The part of a gradient that a rank has, and how values of the parts become those of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from cai_mesh.comm.collectives import all_reduce
from cai_mesh.errors import LayoutError


@dataclass(frozen=True)
class Place:
    """The part of a gradient that a rank has, and who has the others.

    Args:
        shape: the shape of the gradient as it is shown.
        low, high: bounds of the part in the flattened gradient; `shape` is that of the part where it is `local`.
        shard: group of the ranks whose parts make up the whole.
        sums: groups over which sums of all elements are put together.
        local: the part itself is shown (a parameter that is a shard); norms and sums are still those of the whole.
        beyond: ranks outside these groups hold other parameters or parts (pipeline stages), so that a norm over the
            model cannot be put together here.
        axes: mesh axes along which ranks hold different elements.
        owner: whether this copy counts in the norm of a model.
    """

    shape: torch.Size
    low: int
    high: int
    shard: dist.ProcessGroup | None = None
    sums: tuple[dist.ProcessGroup, ...] = ()
    local: bool = False
    beyond: bool = False
    axes: frozenset[str] = frozenset()
    owner: bool = True

    @property
    def alone(self) -> bool:
        """Whether nobody else has any of it."""
        return self.shard is None and not self.sums and not self.beyond

    @property
    def of_a_stage(self) -> bool:
        """Whether all of it is here, and others have other parameters of the model."""
        return self.beyond and not self.axes and not self.sums and self.shard is None and not self.local

    def combine(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """A value of this rank's elements to that of all of them; "min" is for signed values."""
        if self.beyond:
            raise LayoutError(
                "a norm or sum was asked for of gradients that other ranks hold more of",
                cause="pipeline stages, or axes that the mesh of the data ranks lacks, divide the model further",
                fix="cai_mesh.clip_grad_norm_(model.parameters(), max_norm, mesh) with the whole mesh counts all",
            )
        if op == "sum":
            for group in self.sums:
                all_reduce(value, group)
            return value
        return largest(value, self.sums) if op == "max" else -largest(-value, self.sums)


class PlacedGradient(Protocol):
    """A gradient that is shown in the shape of the whole, and of which this rank has a part.

    Attributes:
        part: this rank's part, 1-d.
        place: the part's place in the whole.
        dtype, device: those of the part and the whole.
    """

    part: torch.Tensor
    place: Place
    dtype: torch.dtype
    device: torch.device

    def whole(self) -> torch.Tensor:
        """All of it that is shown. Collective where parts are on other ranks."""
        ...

    def dim(self) -> int:
        """Dimensions of what is shown."""
        ...


def largest(value: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """The largest of each element over the ranks; NaN where any rank has it, which collectives may lose.

    Args:
        value: a tensor of any shape and real dtype, the same on all ranks; it is left as it is.
        groups: one message to each, one after another; none where this is empty.

    Returns a tensor of the shape and dtype of `value`.
    """
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    numbers = torch.nan_to_num(wide, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    table = torch.stack([numbers, wide.isnan().to(numbers.dtype)])
    for group in groups:
        all_reduce(table, group, op="max")
    return torch.where(table[1] > 0, math.nan, table[0]).to(value.dtype)
