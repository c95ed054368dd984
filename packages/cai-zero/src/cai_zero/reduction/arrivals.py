"""The parameters that had a gradient in a step: an optimizer leaves the others as they are, weight decay and all.

So do torch's, which pass over a parameter whose `.grad` is None; in a chunk its gradient would be zero. What one rank
does not use another may, so the ranks agree: one small message a step. Only a rank that lacks a gradient looks at the
answer, and waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cai_mesh.comm import all_reduce
from cai_mesh.gradients import GradBuffer
from cai_zero.reduction.ranks import DataRanks

Places = set[tuple[int, int]]


def absent(buffers: Sequence[GradBuffer], ranks: DataRanks) -> Places:
    """(buffer, parameter in it) of the parameters for which no rank has had a gradient. Collective.

    Args:
        buffers: the buffers of all chunks, the same ones on all ranks.
        ranks: the ranks that hold the same parameters, or shards of them.
    """
    places = [(i, j) for i, buffer in enumerate(buffers) for j in range(len(buffer.params))]
    missing = [k for k, (i, j) in enumerate(places) if j not in buffers[i].arrived]
    if ranks.count > 1 and places:
        flags = torch.ones(len(places), dtype=torch.uint8)
        flags[missing] = 0
        arrived = flags.to(buffers[0].tensor.device, non_blocking=True)
        for group in (ranks.copies, ranks.shard):
            all_reduce(arrived, group, op="max")
        if missing:
            anywhere = arrived.tolist()
            missing = [k for k in missing if not anywhere[k]]
    return {places[k] for k in missing}
