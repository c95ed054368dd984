"""Group norm and SiLU as operators in Triton.

Backward computes SiLU's input again and keeps nothing of it.
"""

from __future__ import annotations

import torch

from cai_kernels.column_sums import column_sums_into
from cai_kernels.compiler import triton
from cai_kernels.group_norm import kernels, reference
from cai_kernels.launch import power_of_2, waves
from cai_kernels.ops import define, gradients_of

WHOLE = (
    16384  # values of a group that one program holds in registers; half of it where channels are neighbours
)
TILE = 2048  # values of a tile of a larger group
CHANNELS = 64  # of such a tile, where channels are neighbours
PARTS = 4  # programs a multiprocessor that sum over parts of the positions
JOINED = 1024  # partial sums that are read at once


def _dense(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """x, copied if neither channels nor positions are neighbours, and whether channels are."""
    if x.is_contiguous():
        return x, False
    if x.movedim(1, -1).is_contiguous():
        return x, True
    return x.contiguous(), False


def _like(dy: torch.Tensor, last: bool) -> torch.Tensor:
    """dy in the layout of x."""
    return dy.movedim(1, -1).contiguous().movedim(-1, 1) if last else dy.contiguous()


class _Sizes:
    """The sizes of an image: channels, positions, groups, and how programs share it."""

    def __init__(self, x: torch.Tensor, groups: int, last: bool):
        self.samples, self.channels = x.shape[:2]
        self.positions = x.numel() // max(self.samples * self.channels, 1)
        self.groups, self.group_channels = groups, self.channels // groups
        block = power_of_2(self.group_channels) * power_of_2(self.positions)
        self.whole = block <= (WHOLE // 2 if last else WHOLE)
        shape = (self.channels, self.positions, groups, self.group_channels)
        if self.whole:
            self.shape = shape
            self.tile = {"CHANNELS": power_of_2(self.group_channels), "POSITIONS": power_of_2(self.positions)}
            self.tile |= {"LAST": last, "num_warps": min(max(block // 512, 1), 16)}
            self.programs = self.samples * groups
            return
        most = CHANNELS if last else max(TILE // power_of_2(self.positions), 1)
        channels = min(power_of_2(self.channels), most)
        positions = min(TILE // channels, power_of_2(self.positions))
        self.tile = {"CHANNELS": channels, "POSITIONS": positions, "LAST": last, "num_warps": 4}
        blocks = self.samples * triton.cdiv(self.channels, channels)
        tiles = triton.cdiv(self.positions, positions)
        part_count = min(max(waves(x.device, PARTS) // max(blocks, 1), 1), tiles)
        self.span = triton.cdiv(tiles, part_count) * positions
        self.parts = triton.cdiv(self.positions, self.span)
        self.walks, self.programs = blocks * self.parts, blocks * tiles
        self.shape = (*shape, tiles)
        self.joined = (self.channels, self.positions, self.span, self.parts, groups, self.group_channels)
        self.block = min(power_of_2(self.parts * self.group_channels), JOINED)


def _group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [N, C, ...], weight, bias [C] -> (y as x, mean, reciprocal deviation [N * groups] in float32)."""
    y, mean, rstd = _empty(x, groups, weight, bias, eps, silu)
    x, last = _dense(x)
    if x.numel() == 0:
        return y, mean, rstd
    sizes = _Sizes(x, groups, last)
    if sizes.whole:
        launch = kernels.whole[(sizes.programs,)]  # pyright: ignore[reportIndexIssue]
        launch((x, weight, bias), (y, mean, rstd), sizes.shape, eps, SILU=silu, **sizes.tile)
        return y, mean, rstd
    partial = [
        x.new_empty(sizes.samples * sizes.parts, sizes.channels, dtype=torch.float32) for _ in range(2)
    ]
    launch = kernels.statistics[(sizes.walks,)]  # pyright: ignore[reportIndexIssue]
    launch(x, tuple(partial), sizes.joined[:4], **sizes.tile)
    launch = kernels.join[(sizes.samples * groups,)]  # pyright: ignore[reportIndexIssue]
    launch(tuple(partial), (mean, rstd), sizes.joined, eps, BLOCK=sizes.block, num_warps=4)
    launch = kernels.apply[(sizes.programs,)]  # pyright: ignore[reportIndexIssue]
    launch((x, weight, bias, mean, rstd), y, sizes.shape, SILU=silu, **sizes.tile)
    return y, mean, rstd


def _group_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    silu: bool,
    need_x: bool,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [N, C, ...], weight and bias [C]; one not needed (its dtype None) is empty."""
    gradients = _empty_gradients(
        dy, x, groups, weight, bias, mean, rstd, silu, need_x, weight_dtype, bias_dtype
    )
    dx, dw, db = gradients
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    x, last = _dense(x)
    inputs = (_like(dy, last), x, weight, bias, mean, rstd)
    sizes = _Sizes(x, groups, last)
    by_size = _backward_whole if sizes.whole else _backward_in_parts
    needed = (weight_dtype is not None, bias_dtype is not None)
    partial = by_size(inputs, dx if need_x else None, sizes, silu, needed)
    sum_pairs = [(p, out) for p, out, need in zip(partial, (dw, db), needed, strict=True) if need]
    if sum_pairs:
        column_sums_into(*zip(*sum_pairs, strict=True))
    return gradients


def _backward_whole(inputs, dx, sizes: _Sizes, silu: bool, needed):
    x = inputs[1]
    partial = [
        x.new_empty(sizes.samples, sizes.channels, dtype=torch.float32) if need else None for need in needed
    ]
    launch = kernels.whole_backward[(sizes.programs,)]  # pyright: ignore[reportIndexIssue]
    launch(inputs, (dx, *partial), sizes.shape, SILU=silu, **sizes.tile)
    return partial


def _backward_in_parts(inputs, dx, sizes: _Sizes, silu: bool, needed):
    x, weight = inputs[1:3]
    rows, count = sizes.samples * sizes.parts, sizes.samples * sizes.groups
    partial = [x.new_empty(rows, sizes.channels, dtype=torch.float32) for _ in range(2)]
    launch = kernels.sums[(sizes.walks,)]  # pyright: ignore[reportIndexIssue]
    launch(inputs, tuple(partial), sizes.joined, SILU=silu, **sizes.tile)
    if dx is not None:
        means = [x.new_empty(count, dtype=torch.float32) for _ in range(2)]
        launch = kernels.join_sums[(count,)]  # pyright: ignore[reportIndexIssue]
        launch((*partial, weight), tuple(means), sizes.joined, BLOCK=sizes.block, num_warps=4)
        launch = kernels.apply_backward[(sizes.programs,)]  # pyright: ignore[reportIndexIssue]
        launch((*inputs, *means), dx, sizes.shape, SILU=silu, **sizes.tile)
    return partial


def _empty(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, rstd = (x.new_empty(x.shape[0] * groups, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(_dense(x)[0]), mean, rstd


def _empty_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    silu: bool,
    need_x: bool,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(_dense(x)[0]) if need_x else x.new_empty(0)
    dw, db = (x.new_empty(0 if d is None else x.shape[1], dtype=d) for d in (weight_dtype, bias_dtype))
    return dx, dw, db


def _save(ctx, inputs, output) -> None:
    x, ctx.groups, weight, bias, ctx.eps, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _mean, _rstd):
    if dy is None:
        return (None,) * 6
    x, weight, bias, mean, rstd = ctx.saved_tensors
    need_x, _, need_weight, need_bias = ctx.needs_input_grad[:4]
    dtypes = (weight.dtype if need_weight else None, bias.dtype if need_bias else None)
    dx, dw, db = group_norm_backward(dy, x, ctx.groups, weight, bias, mean, rstd, ctx.silu, need_x, *dtypes)
    return (
        dx if need_x else None,
        None,
        dw if need_weight else None,
        db if need_bias else None,
        None,
        None,
    )


def _differentiate_again(ctx, dy, _mean, _rstd):
    if dy is None:
        return (None,) * 6
    x, weight, bias, _, _ = ctx.saved_tensors
    need_x, _, *need = ctx.needs_input_grad[:4]

    def plain(x, weight, bias):
        return reference.group_norm(x, ctx.groups, weight, bias, ctx.eps, ctx.silu)

    dx, dw, db = gradients_of(plain, (x, weight, bias), (need_x, *need), dy)
    return dx, None, dw, db, None, None


group_norm_backward = define(_group_norm_backward, _empty_gradients)
group_norm = define(_group_norm, _empty, save=_save, backward=_differentiate, twice=_differentiate_again)
