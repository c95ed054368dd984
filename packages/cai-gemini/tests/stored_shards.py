"""The shards of a few blocks, as whoever shards would hand them to a residency."""

from __future__ import annotations

import torch
from torch import nn

from cai_mesh.protocols import Residency
from cai_mesh.storage import FlatUnit, Share, StoredShard

CPU, BLOCKS = torch.device("cpu"), 4


def shards_of(
    residency: Residency, compute: torch.dtype = torch.float32, width: int = 20
) -> list[StoredShard]:
    """The second shard of every block, of two; the second block is frozen."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(width, 15) for _ in range(BLOCKS))
    stored = []
    for i, block in enumerate(blocks):
        unit = FlatUnit(
            block,
            [(f"{i}.{n}", p.requires_grad_(i != 1)) for n, p in block.named_parameters()],
            master=torch.float32,
            compute=compute,
            device=CPU,
            share=Share(2, 1, frozenset({"dp_shard"})),
            place=residency.place,
        )
        stored.append(StoredShard(unit, CPU, None if i == 1 else torch.float32))
    residency.adopt(stored, None)
    return stored


def trained(stored: list[StoredShard]) -> list[nn.Parameter]:
    return [p for shard in stored for p in shard.unit.kept if p.requires_grad]
