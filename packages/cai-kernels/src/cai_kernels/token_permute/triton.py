"""Tokens to the order of their experts and back, in Triton: a counting sort, then one token a program."""

from __future__ import annotations

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2, row_warps
from cai_kernels.ops import define

CHOICES_EACH = 128  # choices a program of the sort ranks among themselves
COUNTS_EACH = 1024  # counts a step of their prefix sum takes
COUNTS_HELD = 8192  # counts that every program of the sort sums itself, sooner than a launch for the sums
SPREAD_WARP = 256  # columns of a warp that spreads a token


@triton.jit
def _groups(ids_ptr, at, choices, experts):
    """The expert of each choice; `experts` where it is dropped, `experts + 1` past the end."""
    ids = tl.load(ids_ptr + at, mask=at < choices, other=0)
    routed = (ids >= 0) & (ids < experts)
    return tl.where(at < choices, tl.where(routed, ids.to(tl.int32), experts), experts + 1)


@triton.jit
def _count(ids_ptr, counts_ptr, choices, experts, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts [experts + 1, blocks]: how many choices of each block go to each expert."""
    block = tl.program_id(0)
    histogram = tl.histogram(_groups(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), choices, experts), BINS)
    group = tl.arange(0, BINS)
    tl.store(counts_ptr + group * blocks + block, histogram, mask=group <= experts)


@triton.jit
def _scan(counts_ptr, totals_ptr, blocks, BLOCK: tl.constexpr):
    """Replace counts by their exclusive prefix sums within an expert; totals [experts + 1]."""
    group = tl.program_id(0)
    before = 0
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + group * blocks + at, mask=at < blocks, other=0)
        tl.store(counts_ptr + group * blocks + at, before + tl.cumsum(count, 0) - count, mask=at < blocks)
        before += tl.sum(count, 0)
    tl.store(totals_ptr + group, before)


@triton.jit
def _place(
    ids_ptr,
    counts_ptr,
    totals_ptr,
    outputs,
    choices,
    experts,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BINS: tl.constexpr,
):
    """The row of each choice, and offsets, which every program makes for itself: sooner than a launch for them.

    Without totals it also sums the counts itself, all of them at once: BLOCKS for an expert.
    """
    offsets_ptr, index_ptr = outputs
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if totals_ptr is None:
        of = tl.arange(0, BLOCKS)[None, :]
        valid = (bins[:, None] <= experts) & (of < blocks)
        counts = tl.load(counts_ptr + bins[:, None] * blocks + of, mask=valid, other=0)
        total = tl.sum(counts, 1)
        before = tl.sum(tl.where(of < block, counts, 0), 1)
    else:
        total = tl.load(totals_ptr + bins, mask=bins <= experts, other=0)
        before = tl.load(counts_ptr + bins * blocks + block, mask=bins <= experts, other=0)
    offsets = tl.cumsum(total, 0) - total
    tl.store(offsets_ptr + bins, offsets, mask=bins <= tl.where(block == 0, experts, -1))
    at = block * BLOCK + tl.arange(0, BLOCK)
    group = _groups(ids_ptr, at, choices, experts)
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    STEP: tl.constexpr = min(32, BLOCK)
    for first in tl.static_range(0, BLOCK, STEP):
        other_at = block * BLOCK + first + tl.arange(0, STEP)
        other = _groups(ids_ptr, other_at, choices, experts)
        earlier = (other[None, :] == group[:, None]) & (other_at[None, :] < at[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    row = tl.gather(offsets + before, group, 0) + rank
    tl.store(index_ptr + at, tl.where(group < experts, row, -1 - row), mask=at < choices)


@triton.jit
def _spread(
    x_ptr,
    index_ptr,
    weights_ptr,
    y_ptr,
    columns,
    out_rows,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of the result beyond `out_rows`, which only dropped choices have, are not written."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + token * columns + at, mask=inside, other=0.0)
    for k in tl.static_range(K):
        row = tl.load(index_ptr + token * K + k).to(tl.int64)
        routed = row >= 0
        value = x
        if WEIGHTED:
            value = (x.to(tl.float32) * tl.load(weights_ptr + token * K + k).to(tl.float32)).to(x.dtype)
        value = tl.where(routed, value, tl.zeros_like(value))
        place = tl.where(routed, row, -1 - row)
        tl.store(y_ptr + place * columns + at, value, mask=at < tl.where(place < out_rows, columns, 0))


@triton.jit
def _collect(
    y_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    columns,
    rows,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(index_ptr + token * K + k).to(tl.int64)
        end = tl.where((row >= 0) & (row < rows), columns, 0)
        value = tl.load(y_ptr + row * columns + at, mask=at < end, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += value
    tl.store(out_ptr + token * columns + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _uncollect(
    dout_ptr, y_ptr, index_ptr, weights_ptr, dy_ptr, dweights_ptr, columns, rows,
    K: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    dout = tl.load(dout_ptr + token * columns + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(index_ptr + token * K + k).to(tl.int64)
        routed = row >= 0
        y = tl.load(y_ptr + row * columns + at, mask=at < tl.where(routed, columns, 0), other=0.0).to(
            tl.float32
        )
        tl.store(dweights_ptr + token * K + k, tl.sum(y * dout, 0).to(dweights_ptr.dtype.element_ty))
        if SPREAD:
            weight = tl.load(weights_ptr + token * K + k).to(tl.float32)
            value = tl.where(routed, dout * weight, 0.0).to(dy_ptr.dtype.element_ty)
            place = tl.where(routed, row, -1 - row)
            tl.store(dy_ptr + place * columns + at, value, mask=at < tl.where(place < rows, columns, 0))


def _expert_order(expert_ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """expert_ids [T, K] contiguous -> (index [T, K], offsets [E + 1]), both int32."""
    choices = expert_ids.numel()
    index, offsets = _empty_order(expert_ids, n_experts)
    if choices == 0:
        return index, offsets.zero_()
    blocks = triton.cdiv(choices, CHOICES_EACH)
    bins = power_of_2(n_experts + 2)
    counts = offsets.new_empty(n_experts + 1, blocks)
    _count[(blocks,)](expert_ids, counts, choices, n_experts, blocks, BLOCK=CHOICES_EACH, BINS=bins)  # pyright: ignore[reportIndexIssue]
    totals, loaded_blocks = None, power_of_2(blocks)
    if bins * loaded_blocks > COUNTS_HELD:
        totals, loaded_blocks = offsets.new_empty(n_experts + 1), 1
        _scan[(n_experts + 1,)](counts, totals, blocks, BLOCK=COUNTS_EACH)  # pyright: ignore[reportIndexIssue]
    launch = _place[(blocks,)]  # pyright: ignore[reportIndexIssue]
    launch(
        expert_ids, counts, totals, (offsets, index), choices, n_experts, blocks,
        BLOCK=CHOICES_EACH, BLOCKS=loaded_blocks, BINS=bins, num_warps=max(CHOICES_EACH // 32, 1),
    )  # fmt: skip
    return index, offsets


def _token_spread(x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """x [T, D], index [T, K] -> [rows, D], all contiguous; zeros where dropped."""
    return _token_spread_weighted(x, index, None, rows)


def _token_spread_weighted(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None, rows: int
) -> torch.Tensor:
    """`_token_spread` with a factor for every choice, weights [T, K]."""
    out = x.new_empty(rows, x.shape[1])
    tokens, columns = x.shape
    if out.numel():
        block = power_of_2(columns)
        warps = min(max(block // SPREAD_WARP, 1), 16)
        launch = _spread[(tokens,)]  # pyright: ignore[reportIndexIssue]
        launch(
            x, index, weights, out, columns, rows,
            K=index.shape[1], WEIGHTED=weights is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out


def _token_collect(y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """y [rows, D], index [T, K], weights [T, K] (None: ones) -> [T, D], all contiguous."""
    out = _empty_collect(y, index, weights)
    if out.numel():
        block = power_of_2(y.shape[1])
        launch = _collect[(index.shape[0],)]  # pyright: ignore[reportIndexIssue]
        launch(
            y, index, weights, out, y.shape[1], y.shape[0],
            K=index.shape[1], WEIGHTED=weights is not None, BLOCK=block, num_warps=row_warps(block),
        )  # fmt: skip
    return out


def _token_collect_backward(
    dout: torch.Tensor, y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, spread: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of y [rows, D] (an empty tensor without `spread`) and of weights [T, K]."""
    dy, dweights = _empty_collect_gradients(dout, y, index, weights, spread)
    if y.numel():
        block = power_of_2(y.shape[1])
        launch = _uncollect[(index.shape[0],)]  # pyright: ignore[reportIndexIssue]
        launch(
            dout, y, index, weights, dy, dweights, y.shape[1], y.shape[0],
            K=index.shape[1], SPREAD=spread, BLOCK=block, num_warps=row_warps(block),
        )  # fmt: skip
    else:
        dweights.zero_()
    return dy, dweights


def _empty_order(expert_ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(expert_ids, dtype=torch.int32),
        expert_ids.new_empty(n_experts + 1, dtype=torch.int32),
    )


def _empty_collect(y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return y.new_empty(index.shape[0], y.shape[1])


def _empty_collect_gradients(
    dout: torch.Tensor, y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, spread: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(y) if spread else y.new_empty(0), torch.empty_like(weights)


def _save_spread(ctx, inputs, output) -> None:
    _, index, _ = inputs
    ctx.save_for_backward(index)


def _spread_backward(ctx, dy):
    (index,) = ctx.saved_tensors
    return token_collect(dy.contiguous(), index, None), None, None


def _save_collect(ctx, inputs, output) -> None:
    y, index, weights = inputs
    _, _, need_weights, *_ = ctx.needs_input_grad  # torch adds an entry of its own here
    ctx.save_for_backward(y if weights is not None and need_weights else None, index, weights)
    ctx.rows = y.shape[0]


def _collect_backward(ctx, dout):
    y, index, weights = ctx.saved_tensors
    need_y, _, need_weights = ctx.needs_input_grad
    dout = dout.contiguous()
    if not need_weights:
        return token_spread_weighted(dout, index, weights, ctx.rows) if need_y else None, None, None
    dy, dweights = token_collect_backward(dout, y, index, weights, need_y)
    return dy if need_y else None, None, dweights


expert_order = define(_expert_order, _empty_order)
token_collect_backward = define(_token_collect_backward, _empty_collect_gradients)
token_spread_weighted = define(
    _token_spread_weighted, lambda x, index, weights, rows: x.new_empty(rows, x.shape[1])
)
token_spread = define(
    _token_spread,
    lambda x, index, rows: x.new_empty(rows, x.shape[1]),
    save=_save_spread,
    backward=_spread_backward,
    twice=_spread_backward,
)
token_collect = define(_token_collect, _empty_collect, save=_save_collect, backward=_collect_backward)
