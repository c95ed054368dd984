"""A chunk as whoever moves it sees it: a part that stays, with the parameters in it, and a part that comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from cai_mesh.gradients import GradBuffer
from cai_mesh.layout import FlatChunk
from cai_mesh.storage import FlatUnit


class Unit(Protocol):
    """A chunk on one rank: all of it (`ChunkUnit`), or the rank's shard of it (`ShardUnit`).

    Attributes:
        chunk: names of the parameters; where it is sharded, of more elements than are here.
        shard: [n] in master dtype, what stays.
        kept: 1-d parameters, parts of `shard`, some perhaps empty.
        used: the unsharded parameters, which the model computes with.
        ranges: (start, stop) of each of `kept` in `shard`.
        weights: [n], the same elements in the dtype of computation on the device; has memory between
            `allocate_storage` and `free_storage`.
        is_in_use: whether `weights` are in use.
        unreduced: the gradients that whoever sums them over ranks has still to reduce; None where nobody does.
    """

    @property
    def chunk(self) -> FlatChunk: ...
    @property
    def shard(self) -> torch.Tensor: ...
    @property
    def kept(self) -> Sequence[nn.Parameter]: ...
    @property
    def used(self) -> Sequence[nn.Parameter]: ...
    @property
    def ranges(self) -> Sequence[tuple[int, int]]: ...
    @property
    def weights(self) -> torch.Tensor: ...
    @property
    def is_in_use(self) -> bool: ...
    @property
    def unreduced(self) -> GradBuffer | None: ...

    def complete(self) -> None:
        """Return with the gradients of the coming step complete on all ranks. Collective, unless they are already."""

    def move_shard(self, shard: torch.Tensor) -> None:
        """Let another tensor of the same values, perhaps in another memory, be the shard."""

    def allocate_storage(self) -> None:
        """Give `weights` their memory; their contents are undefined."""

    def swap_in(self) -> None:
        """`weights` have their values: let them be used."""

    def hide(self) -> None:
        """`weights` are not used any more; they keep their memory."""

    def free_storage(self) -> None:
        """`hide`, and free the memory."""


class ChunkUnit(FlatUnit):
    """All of a chunk, on one device; a `Unit`."""

    unreduced = None

    def complete(self) -> None:
        return None

    @property
    def weights(self) -> torch.Tensor:
        return self.unsharded

    @property
    def is_in_use(self) -> bool:
        return self.is_unsharded
