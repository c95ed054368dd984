"""How a rank holds its part of the tokens: gathered, and summed and scattered, without a copy of their own.

The tokens of all samples are counted one after the other and dealt out in equal runs. A rank's run has the shape
[samples, sequence/p, ...]: what works token by token never sees that these need not be the tokens of that sample. Parts
of that kind lie one after the other in memory, which cut along the sequence they would not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from cai_mesh.comm import Members, Started, gather_from, gathered, scatter_to, start_scatter_sum

DIM = 1
"""Of the sequence in a hidden state [samples, sequence, features]."""


def _dealt(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[samples, sequence, ...] as [ranks * samples, sequence/ranks, ...]."""
    return x.reshape(ranks * x.shape[0], x.shape[DIM] // ranks, *x.shape[DIM + 1 :])


def _together(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[ranks * samples, sequence/ranks, ...] as [samples, sequence, ...]."""
    return x.reshape(x.shape[0] // ranks, x.shape[DIM] * ranks, *x.shape[DIM + 1 :])


def own_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part [samples, sequence/p, ...] of a replicated x [samples, sequence, ...]; gathered in backward."""
    return scatter_to(_dealt(x, group.size()), 0, group)


def all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[samples, sequence, ...] of parts, used alike on all ranks: in backward each takes its own part."""
    return _together(gather_from(x, 0, group), group.size())


def gathered_tokens(x: torch.Tensor, ranks: Members) -> torch.Tensor:
    """[samples, sequence, ...] of the parts of all ranks; not differentiable."""
    return _together(gathered(x, 0, ranks), ranks.size)


def start_scatter_tokens(x: torch.Tensor, ranks: Members) -> Started:
    """Start to sum x [samples, sequence, ...] over the ranks for this rank's part of it."""
    return start_scatter_sum(_dealt(x, ranks.size), 0, ranks)
