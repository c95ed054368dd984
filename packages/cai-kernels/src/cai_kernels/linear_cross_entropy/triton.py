"""The functions that process a chunk of logits, in Triton: the same as in `rows`.

The fused kernel processes as many rows at a time as the device has multiprocessors, so that the second read of a row
hits the L2 cache.
"""

from __future__ import annotations

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.cross_entropy import triton as kernels
from cai_kernels.cross_entropy.device import (
    Row,
    end_scan,
    merge_tile,
    place_of,
    row_loss,
    scan_row,
    slopes,
    start_scan,
    target_logit,
)
from cai_kernels.cross_entropy.options import LossOptions
from cai_kernels.launch import power_of_2, waves
from cai_kernels.linear_cross_entropy.slice_plan import SlicePlan


@triton.jit
def _loss_and_gradient(
    x_ptr,
    rows_ptrs,
    shape,
    ignored,
    terms,
    AUX: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits [rows, columns] become their gradient.

    rows_ptrs: (target, scale, out [2, ...]); shape: (rows, columns, columns of out).
    """
    target_ptr, scale_ptr, out_ptr = rows_ptrs
    rows, columns, apart = shape
    smoothing, _, z_loss, softcap = terms
    CAP: tl.constexpr = softcap is not None
    scale = tl.load(scale_ptr)
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        base = x_ptr + row * columns
        target = tl.load(target_ptr + row).to(tl.int64)
        reads = tl.where(target == ignored, 0, columns)
        aimed = target_logit(base, target, reads, softcap, CAP)  # before the scan, whose end is a barrier
        top, total, extra = scan_row(base, reads, softcap, AUX, CAP, ALIGNED, BLOCK, STAGES)
        weight = 0.0 if z_loss is None else z_loss
        loss, z = row_loss(top, total, aimed, extra, columns, smoothing, weight)
        loss = tl.where((target >= 0) & (target < columns), loss, float("nan"))
        tl.store(out_ptr + row, tl.where(target == ignored, 0.0, loss))
        tl.store(out_ptr + apart + row, tl.where(target == ignored, 0.0, z))
        # of a row that is not read nothing but zeros may come
        upstream = tl.where(reads > 0, scale, 0.0)
        maximum = tl.where(reads > 0, top, 0.0)
        sum_exp = tl.where(reads > 0, total, 1.0)
        values = Row(maximum, sum_exp, extra, upstream, upstream)
        place = place_of(target, columns)
        for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
            x = tl.load(base + start + at, mask=start + at < reads, other=0.0).to(tl.float32)
            g = slopes(x, start + at, place, values, terms, AUX, CAP)
            tl.store(base + start + at, g.to(x_ptr.dtype.element_ty), mask=start + at < columns)


@triton.jit
def _offset(row, column, places, SLICE: tl.constexpr):
    """Offset of a logit from the beginning of the gradient that holds slices of logits; see `sliced`."""
    first, apart, split, gap, width = places
    slices = (
        column // SLICE
    )  # and no remainder: Triton 3.6 forgets what one is a multiple of, and reads 2 bytes at once
    inside = first + slices * apart + row * SLICE + (column - slices * SLICE)
    return tl.where(column < split, inside, gap + row * width + (column - split))


@triton.jit
def _loss_and_gradient_sliced(
    base_ptr,
    rows_ptrs,
    shape,
    places,
    ignored,
    terms,
    AUX: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `_loss_and_gradient`, of logits in slices whose rows begin at multiples of 16 bytes."""
    target_ptr, scale_ptr, out_ptr = rows_ptrs
    rows, columns, apart = shape
    smoothing, _, z_loss, softcap = terms
    CAP: tl.constexpr = softcap is not None
    EACH: tl.constexpr = min(128 // base_ptr.dtype.element_ty.primitive_bitwidth, BLOCK)
    scale = tl.load(scale_ptr)
    lane = tl.arange(0, BLOCK // EACH)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        target = tl.load(target_ptr + row).to(tl.int64)
        reads = tl.where(target == ignored, 0, columns)
        place = place_of(target, reads)
        aimed_ptr = base_ptr + _offset(row, tl.maximum(place, 0), places, SLICE)
        aimed = target_logit(
            aimed_ptr, tl.minimum(place, 0), 1, softcap, CAP
        )  # before the scan ends in a barrier
        state = start_scan(BLOCK // EACH)
        tiled_columns = reads // BLOCK * BLOCK
        for start in tl.range(0, tiled_columns, BLOCK, num_stages=STAGES):
            x = tl.load(base_ptr + _offset(row, start, places, SLICE) + lane).to(tl.float32)
            state = merge_tile(state, x, None, softcap, 1, AUX, CAP)
        if tiled_columns < reads:
            inside = tiled_columns + lane < reads
            x = tl.load(
                base_ptr + _offset(row, tiled_columns, places, SLICE) + lane, mask=inside, other=-float("inf")
            )
            state = merge_tile(state, x.to(tl.float32), inside, softcap, 1, AUX, CAP)
        top, total, extra = end_scan(state, softcap, AUX, CAP)
        loss, z = row_loss(top, total, aimed, extra, columns, smoothing, 0.0 if z_loss is None else z_loss)
        loss = tl.where((target >= 0) & (target < columns), loss, float("nan"))
        tl.store(out_ptr + row, tl.where(target == ignored, 0.0, loss))
        tl.store(out_ptr + apart + row, tl.where(target == ignored, 0.0, z))
        upstream = tl.where(reads > 0, scale, 0.0)
        maximum = tl.where(reads > 0, top, 0.0)
        sum_exp = tl.where(reads > 0, total, 1.0)
        values = Row(maximum, sum_exp, extra, upstream, upstream)
        for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
            at = base_ptr + _offset(row, start, places, SLICE) + lane
            x = tl.load(at, mask=start + lane < reads, other=0.0).to(tl.float32)
            g = slopes(x, start + lane, place, values, terms, AUX, CAP)
            tl.store(at, g.to(base_ptr.dtype.element_ty), mask=start + lane < columns)


@triton.jit
def _scale_in_place(gradient_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        tile = tl.program_id(0).to(tl.int64)
        while tile * BLOCK < count:
            at = tile * BLOCK + tl.arange(0, BLOCK)
            g = tl.load(gradient_ptr + at, mask=at < count)
            tl.store(gradient_ptr + at, g * factor, mask=at < count)
            tile += tl.num_programs(0)


@triton.jit
def _scale(gradient_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gradient_ptr + at, mask=at < count).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + at, g.to(out_ptr.dtype.element_ty), mask=at < count)


def scan(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, softcap: float, statistic: int
) -> torch.Tensor:
    return kernels.scan(
        logits, target, first=0, ignore_index=ignore_index, softcap=softcap, statistic=statistic
    )


def write_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    loss: LossOptions,
    statistic: int,
) -> None:
    dloss, dentropy = upstream.unbind(0)
    gradients = kernels.Upstream(dloss, dentropy=dentropy)
    kernels.write_gradient(gradients, logits, target, stats.contiguous(), logits, loss, statistic=statistic)


def loss_and_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    loss: LossOptions,
) -> None:
    rows, columns = logits.shape
    block = min(power_of_2(columns), 8192)
    launch = _loss_and_gradient[(min(rows, waves(logits.device)),)]  # pyright: ignore[reportIndexIssue]
    launch(
        logits,
        (target, scale, out),
        (rows, columns, out.stride(0)),
        loss.ignore_index,
        kernels.terms_of(loss, columns),
        AUX=loss.statistic,
        ALIGNED=kernels.aligned(logits),
        BLOCK=block,
        STAGES=3,
        num_warps=max(min(block // 512, 16), 1),
    )


def loss_and_gradient_sliced(
    slice_logits: torch.Tensor,
    buffer: torch.Tensor,
    plan: SlicePlan,
    target: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    loss: LossOptions,
) -> None:
    """`loss_and_gradient` of all tokens: logits in `slice_logits`, the last columns in buffer [T, columns]."""
    rows = buffer.shape[0]
    split = plan.slices * plan.columns
    columns = split + buffer.shape[1]
    gap = (buffer.data_ptr() - slice_logits.data_ptr()) // slice_logits.element_size()
    block = min(plan.columns, 8192)
    launch = _loss_and_gradient_sliced[(min(rows, waves(buffer.device)),)]  # pyright: ignore[reportIndexIssue]
    launch(
        slice_logits,
        (target, scale, out),
        (rows, columns, out.stride(0)),
        (plan.first, rows * plan.columns, split, gap, buffer.shape[1]),
        loss.ignore_index,
        kernels.terms_of(loss, columns),
        AUX=loss.statistic,
        SLICE=plan.columns,
        BLOCK=block,
        STAGES=3,
        num_warps=max(min(block // 512, 16), 1),
    )


def scale_(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a contiguous gradient in place; nothing is read or written if the factor is 1."""
    programs = min(triton.cdiv(gradient.numel(), 4096), waves(gradient.device, 8))
    if programs:
        launch = _scale_in_place[(programs,)]  # pyright: ignore[reportIndexIssue]
        launch(gradient, factor, gradient.numel(), BLOCK=4096, num_warps=8)


def scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous gradient times a scalar, in `dtype`, in one pass."""
    out = torch.empty_like(gradient, dtype=dtype)
    if out.numel():
        launch = _scale[(triton.cdiv(out.numel(), 4096),)]  # pyright: ignore[reportIndexIssue]
        launch(gradient, factor, out, out.numel(), BLOCK=4096, num_warps=8)
    return out
