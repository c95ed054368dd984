"""What a chunk is to whoever moves it: a part that stays, with the parameters in it, and a part that comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from cai_mesh.layout import FlatChunk


class Unit(Protocol):
    """A chunk on one rank: all of it (`cai_mesh.storage.FlatUnit`), or the rank's shard of it (`ShardUnit`).

    Attributes:
        chunk: names of the parameters; where it is sharded, of more elements than are here.
        shard: [n] in master dtype, what stays.
        kept: 1-d parameters, parts of `shard`, some perhaps empty.
        ranges: (start, stop) of each of `kept` in `shard`.
        whole: [n], the same elements in the dtype of computation on the device; has memory between `allocate_storage`
            and `free_storage`.
        is_whole: whether `whole` is in use.
    """

    @property
    def chunk(self) -> FlatChunk: ...
    @property
    def shard(self) -> torch.Tensor: ...
    @property
    def kept(self) -> Sequence[nn.Parameter]: ...
    @property
    def ranges(self) -> Sequence[tuple[int, int]]: ...
    @property
    def whole(self) -> torch.Tensor: ...
    @property
    def is_whole(self) -> bool: ...

    def move_shard(self, shard: torch.Tensor) -> None:
        """Let another tensor of the same values, perhaps in another memory, be the shard."""

    def allocate_storage(self) -> None:
        """Give `whole` its memory; its contents are undefined."""

    def swap_in(self) -> None:
        """`whole` has its values: let it be used."""

    def hide(self) -> None:
        """`whole` is not used any more; it keeps its memory."""

    def free_storage(self) -> None:
        """`hide`, and free the memory."""
