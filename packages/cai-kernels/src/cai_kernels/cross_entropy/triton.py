"""Cross-entropy in Triton: one pass over a row for the loss, one more for its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.cross_entropy.device import (
    Row,
    capped,
    load_target,
    place_of,
    row_loss,
    row_offset,
    scan_row,
    slopes,
)
from cai_kernels.cross_entropy.options import ENTROPY, PLAIN, LossOptions
from cai_kernels.launch import power_of_2
from cai_kernels.ops import define

NONE, SUM, MEAN = 0, 1, 2  # reductions
ROWS = 4096  # whose losses are summed at once
NEVER = -(1 << 62)  # an ignore_index no target has

_ENTROPY = tl.constexpr(ENTROPY)
_NONE, _MEAN = tl.constexpr(NONE), tl.constexpr(MEAN)


@triton.jit
def _scan(
    x_ptr,
    target_ptr,
    stats_ptr,
    shapes,
    scalars,
    AUX: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """stats [4, rows]: maximum, sum of exponentials, target's logit, auxiliary.

    shapes: (rows, columns, of x); scalars: (softcap, first, ignored).
    """
    rows, columns, shape = shapes
    softcap, first, ignored = scalars
    CAP: tl.constexpr = softcap is not None
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    x_ptr += row_offset(row, shape)
    reads = tl.where(target == ignored, 0, columns)
    aimed = load_target(x_ptr, target - first, reads)
    top, total, extra = scan_row(x_ptr, reads, softcap, AUX, CAP, ALIGNED, BLOCK, STAGES)
    tl.store(stats_ptr + row, top)
    tl.store(stats_ptr + rows + row, total)
    tl.store(stats_ptr + 2 * rows + row, capped(aimed, softcap, CAP))
    tl.store(stats_ptr + 3 * rows + row, extra)


@triton.jit
def _finish(
    stats_ptr,
    target_ptr,
    out_ptrs,
    rows,
    columns,
    ignored,
    smoothing,
    z_loss,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out_ptrs: losses, z-losses, and the factor that a mean puts on every gradient."""
    loss_ptr, z_ptr, scale_ptr = out_ptrs
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    loss_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    z_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    weight = 0.0 if smoothing is None else smoothing
    count = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(tl.cdiv(rows, BLOCK) if REDUCTION != _NONE else 1):
        inside = at < rows
        target = tl.load(target_ptr + at, mask=inside, other=0).to(tl.int64)
        # not by what the target says, so that nothing waits for it
        top = tl.load(stats_ptr + at, mask=inside, other=0.0)
        total = tl.load(stats_ptr + rows + at, mask=inside, other=1.0)
        aimed = tl.load(stats_ptr + 2 * rows + at, mask=inside, other=0.0)
        logit_sum = tl.zeros((BLOCK,), dtype=tl.float32)
        if smoothing is not None:
            logit_sum = tl.load(stats_ptr + 3 * rows + at, mask=inside, other=0.0)
        counts = inside & (target != ignored)
        total = tl.where(counts, total, 1.0)
        loss, z = row_loss(top, total, aimed, logit_sum, columns, weight, z_loss)
        loss = tl.where((target >= 0) & (target < columns), loss, float("nan"))
        loss = tl.where(counts, loss, 0.0)
        z = tl.where(counts, z, 0.0)
        if REDUCTION == _NONE:
            tl.store(loss_ptr + at, loss, mask=inside)
            tl.store(z_ptr + at, z, mask=inside)
        loss_sum += loss
        z_sum += z
        count += counts.to(tl.float32)
        at += BLOCK
    if REDUCTION != _NONE:
        scale = 1.0 / tl.sum(count, 0) if REDUCTION == _MEAN else 1.0
        tl.store(loss_ptr, tl.sum(loss_sum, 0) * scale)
        tl.store(z_ptr, tl.sum(z_sum, 0) * scale)
        tl.store(scale_ptr, scale)
    elif tl.program_id(0) == 0:
        tl.store(scale_ptr, 1.0)


@triton.jit
def _gradient(
    upstream,
    x_ptr,
    target_ptr,
    stats_ptr,
    dx_ptr,
    shapes,
    scalars,
    terms,
    AUX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of one row a program. upstream: (gradients of the losses, their stride, factor, gradients of entropies).

    A row whose upstream is 0 is not read. shapes: (rows, columns, shape of x, shape of dx), scalars: (first, ignored).
    """
    dloss_ptr, dloss_stride, scale_ptr, dentropy_ptr = upstream
    rows, columns, x_shape, dx_shape = shapes
    first, ignored = scalars
    _, _, _, softcap = terms
    CAP: tl.constexpr = softcap is not None
    tiles = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    factor = tl.load(dloss_ptr + row * dloss_stride)
    if scale_ptr is not None:
        factor *= tl.load(scale_ptr)
    factor = tl.where(target == ignored, 0.0, factor)
    reads = tl.where(factor != 0.0, columns, 0)
    of_entropy = factor
    if AUX == _ENTROPY:
        of_entropy = tl.where(target == ignored, 0.0, tl.load(dentropy_ptr + row))
        reads = tl.where(of_entropy != 0.0, columns, reads)
    at = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    # of a row that is not read nothing but zeros may come
    top = tl.where(reads > 0, tl.load(stats_ptr + row), 0.0)
    total = tl.where(reads > 0, tl.load(stats_ptr + rows + row), 1.0)
    extra = tl.where(reads > 0, tl.load(stats_ptr + 3 * rows + row), 0.0)
    x = tl.load(x_ptr + row_offset(row, x_shape) + at, mask=at < reads, other=0.0).to(tl.float32)
    place = place_of(target - first, columns)
    g = slopes(x, at, place, Row(top, total, extra, factor, of_entropy), terms, AUX, CAP)
    tl.store(dx_ptr + row_offset(row, dx_shape) + at, g.to(dx_ptr.dtype.element_ty), mask=at < columns)


def _shape(x: torch.Tensor) -> tuple[int, int, int]:
    """The `shape` of `row_offset` for [rows, columns] or [outer, inner, columns]."""
    return (x.shape[-2], x.stride(0) if x.dim() == 3 else 0, x.stride(-2))


def aligned(logits: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    lengths = (*logits.stride()[:-1], logits.storage_offset())
    return all(n * logits.element_size() % 16 == 0 for n in lengths)


def _scan_sizes(logits: torch.Tensor) -> dict[str, int]:
    block = min(power_of_2(logits.shape[-1]), 4096)
    return {
        "ALIGNED": aligned(logits), "BLOCK": block, "STAGES": 3, "num_warps": max(min(block // 512, 8), 1),
    }  # fmt: skip


@dataclass(frozen=True)
class Upstream:
    """The gradients that arrive at rows.

    Args:
        dloss: gradient of the losses, [rows] or a scalar.
        scale: factor on `dloss`, or None for 1.
        dentropy: gradient of the entropies, [rows], or None.
    """

    dloss: torch.Tensor
    scale: torch.Tensor | None = None
    dentropy: torch.Tensor | None = None


def terms_of(loss: LossOptions, vocabulary: int) -> tuple[float, float, float | None, float | None]:
    """The terms of a loss as the kernels take them, see `device.slopes`."""
    smoothing = loss.label_smoothing
    return smoothing, smoothing / vocabulary, loss.z_loss or None, loss.softcap or None


def scan(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    first: int,
    ignore_index: int,
    softcap: float,
    statistic: int,
) -> torch.Tensor:
    """Logits [rows, columns] or [outer, inner, columns], columns contiguous, target [rows] -> stats [4, rows] float32.

    A softcap of 0 is none. Rows whose target is `ignore_index` are not read. `first`: class of the first column.
    """
    rows = target.numel()
    stats = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        scalars = (softcap or None, first, ignore_index)
        launch = _scan[(rows,)]  # pyright: ignore[reportIndexIssue]
        sizes = _scan_sizes(logits)
        shapes = (rows, logits.shape[-1], _shape(logits))
        launch(logits, target, stats, shapes, scalars, AUX=statistic, **sizes)
    return stats


def write_gradient(
    upstream: Upstream,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    out: torch.Tensor,
    loss: LossOptions,
    *,
    first: int = 0,
    vocabulary: int | None = None,
    statistic: int = PLAIN,
) -> None:
    """Write the gradient of the logits to `out`, which may be the logits.

    `first`: class of the first column. `vocabulary`: its size, by default the number of columns.
    """
    rows, columns = target.numel(), logits.shape[-1]
    if not rows:
        return
    block = min(power_of_2(columns), 4096)
    launch = _gradient[(rows * triton.cdiv(columns, block),)]  # pyright: ignore[reportIndexIssue]
    shapes = (rows, columns, _shape(logits), _shape(out))
    dloss = upstream.dloss
    launch(
        (dloss, 1 if dloss.dim() else 0, upstream.scale, upstream.dentropy),
        logits,
        target,
        stats,
        out,
        shapes,
        (first, loss.ignore_index),
        terms_of(loss, vocabulary or columns),
        AUX=statistic,
        BLOCK=block,
        num_warps=max(min(block // 512, 8), 1),
    )


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, z-loss, stats [4, rows], factor of a mean); losses are [rows] or scalars."""
    rows, columns = target.numel(), logits.shape[-1]
    statistic = LossOptions(ignore_index, label_smoothing).statistic
    stats = scan(logits, target, first=0, ignore_index=ignore_index, softcap=softcap, statistic=statistic)
    loss = torch.empty((rows,) if reduction == NONE else (), dtype=torch.float32, device=logits.device)
    z = torch.empty_like(loss)
    scale = torch.empty((), dtype=torch.float32, device=logits.device)
    block = min(power_of_2(rows), ROWS if reduction else 256)
    launch = _finish[(1 if reduction else max(triton.cdiv(rows, block), 1),)]  # pyright: ignore[reportIndexIssue]
    launch(
        stats,
        target,
        (loss, z, scale),
        rows,
        columns,
        ignore_index,
        label_smoothing or None,
        z_loss,
        reduction,
        block,
        num_warps=max(block // 256, 4),
    )
    return loss, z, stats, scale


def _empty(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    loss = logits.new_empty((target.numel(),) if reduction == NONE else (), dtype=torch.float32)
    stats = logits.new_empty((4, target.numel()), dtype=torch.float32)
    return loss, torch.empty_like(loss), stats, logits.new_empty((), dtype=torch.float32)


def _cross_entropy_backward(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> torch.Tensor:
    """The gradient of the logits, contiguous. dloss is [rows] or a scalar, float32."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    loss = LossOptions(ignore_index, label_smoothing, z_loss, softcap)
    write_gradient(Upstream(dloss, scale), logits, target, stats, out, loss)
    return out


def _empty_gradient(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx, inputs, output) -> None:
    logits, target, ignore_index, _, label_smoothing, z_loss, softcap, inplace = inputs
    _, z, stats, scale = output
    ctx.save_for_backward(logits, target, stats, scale)
    ctx.mark_non_differentiable(z, stats, scale)
    ctx.set_materialize_grads(False)
    ctx.loss, ctx.inplace = LossOptions(ignore_index, label_smoothing, z_loss, softcap), inplace


def _differentiate(ctx, dloss, _z, _stats, _scale):
    no_gradients = (None,) * 7
    if dloss is None:
        return None, *no_gradients
    logits, target, stats, scale = ctx.saved_tensors
    dloss = dloss.contiguous()
    if not ctx.inplace:
        return cross_entropy_backward(
            dloss, logits, target, stats, scale, **ctx.loss.arguments()
        ), *no_gradients
    out = logits.detach()
    write_gradient(Upstream(dloss, scale), out, target, stats, out, ctx.loss)
    torch.autograd.graph.increment_version(logits)  # a second backward is then torch's own error
    return out, *no_gradients


cross_entropy_backward = define(_cross_entropy_backward, _empty_gradient)
cross_entropy = define(_cross_entropy, _empty, save=_save, backward=_differentiate)


def _cross_entropy_scan(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    first: int,
    ignore_index: int,
    softcap: float,
    statistic: int,
) -> torch.Tensor:
    return scan(logits, target, first=first, ignore_index=ignore_index, softcap=softcap, statistic=statistic)


def _empty_stats(logits: torch.Tensor, target: torch.Tensor, **_) -> torch.Tensor:
    return logits.new_empty((4, target.numel()), dtype=torch.float32)


def _cross_entropy_gradient_(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    out: torch.Tensor,
    *,
    first: int,
    vocabulary: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> None:
    loss = LossOptions(NEVER, label_smoothing, z_loss, softcap)
    write_gradient(Upstream(dloss), logits, target, stats, out, loss, first=first, vocabulary=vocabulary)


cross_entropy_scan = define(_cross_entropy_scan, _empty_stats)
cross_entropy_gradient_ = define(_cross_entropy_gradient_, mutates=("out",))
