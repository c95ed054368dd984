"""The knowledge with which a mode changes one module."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from cai_mesh.comm import Members
from cai_mesh.gradients import Readers
from cai_tensor_parallel.modes.cutter import Cutter
from cai_tensor_parallel.modes.forms import GRIDS, Axes, Grid
from cai_tensor_parallel.modes.sequence import Sequence


class Ranks(Protocol):
    """Degrees, indices and groups along axes: a `ParallelMesh`, or the virtual ranks of a trial."""

    def degree(self, axes: str | collections.abc.Sequence[str]) -> int: ...

    def index(self, axes: str | collections.abc.Sequence[str]) -> int: ...

    def group(self, axes: str | collections.abc.Sequence[str]) -> dist.ProcessGroup | None: ...


@dataclass
class ModeContext:
    """Ranks and parameter cutter of one `parallelize` call.

    Args:
        ranks: the ranks of the axis `tp` and its parts.
        cutter: the cutter of parameters over them.
        mode: its name.
        sharded_logits: an output layer cut by vocabulary leaves its results cut.
        sequence: the cut of the stream along the sequence, in mode 1d (None: there is none).
        overlap: products and what travels along the sequence run beside each other.
        readers: the column-cut layers that read the same, by the module around them.
        enclosed: layers that see the whole sequence, although it is cut elsewhere.
        module_name: the name that errors give.
    """

    ranks: Ranks
    cutter: Cutter
    mode: str = "1d"
    sharded_logits: bool = False
    sequence: Sequence | None = None
    overlap: bool = False
    readers: dict[str, Readers] = field(default_factory=dict)
    enclosed: frozenset[str] = frozenset()
    module_name: str = ""

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks of `tp`."""
        group = self.ranks.group("tp")
        assert group is not None  # more than one rank
        return group

    @property
    def grid(self) -> Grid:
        """The form of activations in a mode that cuts samples and features."""
        return GRIDS[self.mode]

    def members(self, axes: Axes) -> Members | None:
        """The ranks along some axes; None where this one is alone."""
        group = self.ranks.group(axes)
        return None if group is None else Members.of(group)
