"""Reduction of a chunk's gradients: the communication, apart from who calls it."""

from __future__ import annotations

import torch

from cai_mesh import comm
from cai_mesh.comm import Op, all_reduce
from cai_mesh.layout import ReduceSpec
from cai_zero.compress import Compression, reduce_gradients
from cai_zero.ranks import DataRanks


def reduce_chunk(
    full: torch.Tensor,
    ranks: DataRanks,
    spec: ReduceSpec,
    compression: Compression,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Reduce the gradients of a whole chunk and return this rank's rows (`full` itself where rows are not divided).

    The order is that of `ReduceSpec`: holders of a tied parameter, then axes with partial gradients, then the data
    axes; then the divisor. Only the sum over the ranks that share rows is compressed. `full` [numel] is overwritten,
    `residual` [numel] updated.
    """
    if spec.tied is not None:
        all_reduce(full, spec.tied)
    others = ranks.other_axes(spec)
    if others and ranks.mesh is not None:
        all_reduce(full, comm.group(ranks.mesh, others))
    shard, divisor = full, ranks.divisor(spec)
    copies = ranks.replicate.size() if ranks.replicate is not None else 1
    # NCCL divides on the way; elsewhere, and where quantised, a division after the sum loses least
    average: Op = "avg" if full.is_cuda and divisor == ranks.size * copies else "sum"
    if ranks.shard is not None:
        shard = reduce_gradients(compression, full, ranks.shard, residual, op=average)
    all_reduce(shard, ranks.replicate, op=average)
    if average == "sum" and divisor != 1.0:
        shard.div_(divisor)
    return shard
