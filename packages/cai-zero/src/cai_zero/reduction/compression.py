"""Communication of weights and gradients as one byte an element; `cai_zero.reduction.quantization` has the mathematics.

The quantised all-gather of weights and the all-to-all reduction of quantised gradients, which adds in full precision
and so quantises every gradient once, are those of ZeRO++ (Wang et al., arXiv:2306.10209). What quantisation takes
from a gradient is kept by the rank that lost it and added to its next one (error feedback: Seide et al., Interspeech
2014; Karimireddy et al., arXiv:1901.09847), so over the steps nothing is lost.

Such a residual is part of a resume on the same ranks (`ShardedOptimizer.state_dict`, `ModuleSharding.residuals`) and
not of a checkpoint that reshards, where it starts from zero: it belongs to a rank and the gradients that rank saw, so
no other layout has a place for it, and what is dropped is the rounding of one step, once.

Codes and scales of a part share one byte buffer, so each function is one collective. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh.comm import (
    Done,
    Op,
    PeerGather,
    PeerReduce,
    all_gather_into,
    all_to_all_into,
    reduce_scatter_into,
)
from cai_mesh.errors import PlanError
from cai_mesh.layout import ALIGNMENT
from cai_mesh.protocols import CommHandle
from cai_zero.reduction.quantization import BLOCK, DTYPES, Form, check_form, dequantize, quantize
from cai_zero.reduction.ranks import DataRanks

SCALE_BYTES = 4


@dataclass(frozen=True)
class Compression:
    """The tensors that travel between the ranks of a chunk in one byte an element instead of two or four.

    Args:
        weights: form in which parameters are gathered. Every rank computes with the values read back, its own
            shard's too, so weights stay bitwise equal on all ranks; the optimizer steps shards of full precision.
        gradients: form in which gradients are reduced.
        block: elements that share a scale, a multiple of 128; fewer (still a multiple of 128) in chunks whose shards
            it does not divide.
        error_feedback: keep what quantisation takes from a gradient and add it to the next one. Costs every rank a
            tensor of the size of its unsharded gradients, in the dtype of the reduction.

    Raises `PlanError` for an unknown form or such a block.
    """

    weights: Form | None = None
    gradients: Form | None = None
    block: int = BLOCK
    error_feedback: bool = True

    def __post_init__(self) -> None:
        for form in (self.weights, self.gradients):
            if form is not None:
                check_form(form)
        if self.block < ALIGNMENT or self.block % ALIGNMENT:
            raise PlanError(
                "a compressed block does not fit the alignment of chunks",
                got=self.block,
                expected=f"a multiple of {ALIGNMENT}",
            )

    def new_residual(self, full: torch.Tensor) -> torch.Tensor | None:
        """Zeros for the residual of gradients like `full`, or None where there is nothing to keep."""
        return torch.zeros_like(full) if self.gradients is not None and self.error_feedback else None


def check_ranks(
    compression: Compression | None, ranks: DataRanks, stage: int, *, copy_engines: bool = False
) -> None:
    """Raise `PlanError` where what is to be compressed is not: in stage 0, between copies, by copy engines."""
    if compression is None or not (compression.weights or compression.gradients):
        return
    if stage == 0:
        raise PlanError(
            "stage 0 cannot compress what travels",
            got=compression,
            cause="it sums gradients over copies in one all-reduce, and gathers no weights",
            fix="use stage 1, which moves as many elements",
        )
    if copy_engines and compression.weights is not None:
        raise PlanError(
            "compressed weights cannot be gathered by copy engines",
            cause="those copy shards as they are",
            fix="leave one of compression.weights and copy_engines out",
        )
    if ranks.shard is None and ranks.copies is not None:
        raise PlanError(
            "there is nothing that could be compressed: all ranks hold the same elements",
            got=f"copies over {ranks.copy_axes}",
            expected="an axis over which chunks are sharded",
            cause="sums over copies travel in full precision",
            fix="put the ranks on dp_shard, or leave compression out",
        )


def pack(parts: torch.Tensor, form: Form, block: int) -> torch.Tensor:
    """Quantise every row of `parts` [ranks, n] into bytes [ranks, n + 4 n / block]: its codes, then its scales."""
    codes, scales = quantize(parts, form, block)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def unpack(packed: torch.Tensor, out: torch.Tensor, form: Form, block: int) -> torch.Tensor:
    """Read the rows that `pack` wrote into `out` [ranks, n] and return it."""
    n = out.shape[1]
    return dequantize(packed[:, :n].view(DTYPES[form]), packed[:, n:].view(torch.float32), out, block)


def _block(numel: int, ranks: int, block: int) -> int:
    """The largest divisor of `block` that no shard of `numel / ranks` elements cuts."""
    part, rest = divmod(numel, ranks)
    divisor = math.gcd(part, block)
    if rest or divisor % SCALE_BYTES:
        raise PlanError(
            "a tensor cannot be compressed in equal parts",
            got=f"{numel} elements for {ranks} ranks",
            expected="a FlatChunk's, whose length is a multiple of ranks x 128",
        )
    return divisor


class _Then:
    """A communication under way and what is left to do with its result."""

    def __init__(self, handle: CommHandle, finish: Callable[[], object]):
        self._handle, self._finish = handle, finish

    def wait(self) -> None:
        self._handle.wait()
        self._finish()


@torch.no_grad()
def all_gather_compressed(
    unsharded: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup | None,
    form: Form,
    block: int = BLOCK,
    *,
    async_op: bool = False,
) -> CommHandle:
    """Gather every rank's `shard` into `unsharded` as quantised bytes; all ranks read the same numbers, bit for bit.

    Args:
        unsharded: [ranks * n], written. Part of it may be `shard`, which then becomes what the others read.
        shard: [n], this rank's, of any floating-point dtype: quantised from that, read back in `unsharded`'s.
        group: None is a world of one, where nothing travels and nothing is quantised.
        async_op: return at once; `unsharded` is written by `wait`, which must be called from the stream that uses it.

    Raises `PlanError` where the parts are not equal.
    """
    if group is None:
        return all_gather_into(unsharded, shard, None)
    ranks = group.size()
    block = _block(unsharded.numel(), ranks, block)
    mine = pack(shard.view(1, -1), form, block)
    packed = mine.new_empty(ranks, mine.shape[1])
    handle = all_gather_into(packed, mine, group, async_op=async_op)
    then = _Then(handle, lambda: unpack(packed, unsharded.view(ranks, -1), form, block))
    if async_op:
        return then
    then.wait()
    return Done()


@torch.no_grad()
def reduce_scatter_compressed(
    shard: torch.Tensor,
    full: torch.Tensor,
    group: dist.ProcessGroup | None,
    form: Form,
    block: int = BLOCK,
    residual: torch.Tensor | None = None,
) -> None:
    """Add `full` over the group, each rank's contribution quantised once, and keep this rank's part in `shard`.

    Args:
        shard: [n], written; may be part of `full`.
        full: [ranks * n], this rank's contribution; overwritten.
        group: None is a world of one, where nothing is quantised and a residual is left as it is.
        residual: [ranks * n] or None. Added to `full` first, then overwritten with what was not sent: contribution
            minus the numbers the others read. Blocks that hold NaN or infinities leave nothing behind; their part of
            the sum is not finite on the rank that owns it.

    Contributions are added in float32 (float64 for float64), in the order of ranks.
    Raises `PlanError` where the parts are not equal.
    """
    if group is None:
        if shard.data_ptr() != full.data_ptr():
            shard.copy_(full)
        return
    ranks = group.size()
    block = _block(full.numel(), ranks, block)
    exact = full if full.dtype == torch.float64 else full.float()  # full itself where it has that dtype
    parts = exact.view(ranks, -1)
    if residual is not None:
        exact.add_(residual)
    sent = pack(parts, form, block)
    if residual is not None:
        read = unpack(sent, torch.empty_like(parts), form, block)
        torch.sub(exact, read.view(-1), out=read.view(-1))
        residual.copy_(read.view(-1).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
        del read
    received = torch.empty_like(sent)
    all_to_all_into(received, sent, group)
    shard.copy_(unpack(received, parts, form, block).sum(dim=0))


@torch.no_grad()
def gather_weights(
    compression: Compression,
    unsharded: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    async_op: bool = False,
    peer: PeerGather | None = None,
) -> CommHandle:
    """Gather every rank's `shard` [n], of any dtype, into `unsharded` [ranks * n], in the form `compression` says.

    With `peer`, copy engines do it.
    """
    if group is None:
        return all_gather_into(unsharded, shard, None)
    if peer is not None:
        peer(unsharded, shard)
        return Done()
    if compression.weights is not None:
        form, block = compression.weights, compression.block
        return all_gather_compressed(unsharded, shard, group, form, block, async_op=async_op)
    part = unsharded.view(group.size(), -1)[group.rank()]
    if part.data_ptr() != shard.data_ptr():
        part.copy_(shard, non_blocking=True)
    return all_gather_into(unsharded, part, group, async_op=async_op)


@torch.no_grad()
def reduce_gradients(
    compression: Compression,
    full: torch.Tensor,
    group: dist.ProcessGroup,
    residual: torch.Tensor | None,
    *,
    op: Op = "sum",
    peer: PeerReduce | None = None,
) -> torch.Tensor:
    """The sum or mean over the group of this rank's part of `full` [ranks * n]; a new tensor [n]. Overwrites `full`.

    With `peer`, copy engines do it, unless gradients are compressed.
    """
    shard = full.new_empty(full.numel() // group.size())
    if compression.gradients is None and peer is None:
        reduce_scatter_into(shard, full, group, op=op)
        return shard
    if compression.gradients is None and peer is not None:
        peer(shard, full)
    elif compression.gradients is not None:
        form, block = compression.gradients, compression.block
        reduce_scatter_compressed(shard, full, group, form, block, residual)
    if op == "avg":
        shard.div_(group.size())
    return shard
