"""Reduction of a chunk's gradients: the communication, apart from who calls it."""

from __future__ import annotations

import contextlib

import torch

from cai_mesh import build
from cai_mesh.collectives import all_reduce, reduce_scatter_into
from cai_mesh.reduce import ReduceSpec
from cai_zero.ranks import DataRanks


class ReduceStream:
    """Runs reductions beside compute: a side stream on a GPU, in place elsewhere."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after_compute(self, *tensors: torch.Tensor):
        """Work inside runs once what has been issued so far is done; `tensors` stay alive until it has run."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let the compute stream wait for every reduction."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def reduce_chunk(full: torch.Tensor, ranks: DataRanks, spec: ReduceSpec) -> torch.Tensor:
    """Reduce the gradients of a whole chunk and return this rank's rows (a view of `full`).

    The order is that of `ReduceSpec`: holders of a tied parameter, then axes with partial gradients, then the data
    axes; then the divisor. `full` [numel] is overwritten.
    """
    if spec.tied is not None:
        all_reduce(full, spec.tied)
    others = ranks.other_axes(spec)
    if others and ranks.mesh is not None:
        all_reduce(full, build.group(ranks.mesh, others))
    rows = full.numel() // ranks.size
    shard = full[ranks.index * rows : (ranks.index + 1) * rows]
    if ranks.shard is not None:
        out = torch.empty_like(shard)
        reduce_scatter_into(out, full, ranks.shard)
        shard = out
    all_reduce(shard, ranks.replicate)
    divisor = ranks.divisor(spec)
    if divisor != 1.0:
        shard.div_(divisor)
    return shard
