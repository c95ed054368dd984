"""Attention over a paged cache in Triton: the keys of a query are split over programs, then the parts merge."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import dot_precision, pdl_options, power_of_2, waves
from cai_kernels.ops import define
from cai_kernels.tiles import dot, launch_dependents, wait_for_previous

KEYS = 64  # the most keys of a step
MAX_SPLITS = 64
PROGRAMS = 4  # on a multiprocessor, where keys are split
LOG2E = tl.constexpr(1.4426950408889634)


class Paged(NamedTuple):
    """q [T, N, H], caches [blocks, block_size, Nkv, H or Hv], tables [T, most], lengths [T], the parts."""

    q: object
    k_cache: object
    v_cache: object
    tables: object
    lengths: object
    sinks: object  # [N], any floating dtype, or None
    parts: object  # [T, N, splits, Hv] float32; with one split [T, N, Hv] of q's dtype
    lses: object  # [T, N, splits] float32, base 2


class Sizes(NamedTuple):
    """Strides of q, heads of queries and keys, block size, blocks a table has room for, splits."""

    q_row: int
    q_head: int
    heads: int
    key_heads: int
    block: int
    most: int
    splits: int


class Scores(NamedTuple):
    """What makes scores of products: their factor, the keys that are seen and the soft cap, 0 for none."""

    scale: float
    window: int
    softcap: float


class Appended(NamedTuple):
    """New rows [T, Nkv, H], their strides of tokens and heads, the cache, and the numbers of a token."""

    rows: object
    token_stride: int
    head_stride: int
    cache: object
    columns: int


@triton.jit
def _append_rows(appended, token, slot, part, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    at = part * BLOCK + tl.arange(0, BLOCK)
    where = token * appended.token_stride + at // HEAD * appended.head_stride + at % HEAD
    value = tl.load(appended.rows + where, mask=at < appended.columns, other=0.0)
    inside = at < tl.where(slot >= 0, appended.columns, 0)
    place = appended.cache + slot * appended.columns + at
    tl.store(place, value.to(appended.cache.dtype.element_ty), mask=inside)


@triton.jit
def _append(
    keys, values, slots_ptr, HEAD: tl.constexpr, HEAD_V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A part of one token's keys, or values."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if tl.program_id(2) == 0:
        _append_rows(keys, token, slot, tl.program_id(1), HEAD, BLOCK)
    else:
        _append_rows(values, token, slot, tl.program_id(1), HEAD_V, BLOCK)


@triton.jit
def _capped(score, softcap):
    """softcap * tanh(score / softcap), and the score itself for a soft cap of 0."""
    divisor = tl.where(softcap > 0.0, softcap, 1.0)
    capped = softcap * (2.0 * tl.sigmoid(2.0 * score / divisor) - 1.0)
    return tl.where(softcap > 0.0, capped, score)


@triton.jit
def _span(paged, sizes, window, row, split, KEYS: tl.constexpr):
    """The keys of one split of a row: the last ones of its sequence that are seen, in equal parts of whole steps."""
    length = tl.load(paged.lengths + row).to(tl.int32)
    first = tl.maximum(length - window, 0)
    steps = tl.cdiv(tl.cdiv(length - first, sizes.splits), KEYS)
    begin = first + split * steps * KEYS
    return begin, tl.minimum(begin + steps * KEYS, length)


@triton.jit
def _part(
    paged, sizes, scores,
    GROUP: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
    HEAD_V: tl.constexpr, WIDE_V: tl.constexpr, ALONE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query row, the query heads of one key head, one split of the keys: its attention and log-sum-exp."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = sizes.heads // sizes.key_heads
    member, at, at_v = tl.arange(0, GROUP), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    head = key_head * group + member
    q_mask = (member < group)[:, None] & (at < HEAD)[None, :]
    where_q = row * sizes.q_row + head[:, None] * sizes.q_head + at[None, :]
    q = tl.load(paged.q + where_q, mask=q_mask, other=0.0)
    table = paged.tables + row * sizes.most
    begin, end = _span(paged, sizes, scores.window, row, split, KEYS)
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    out = tl.zeros((GROUP, WIDE_V), dtype=tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        valid = key < end
        block = tl.load(table + key // sizes.block, mask=valid, other=0).to(tl.int64)
        slot = (block * sizes.block + key % sizes.block) * sizes.key_heads + key_head
        mask = valid[:, None] & (at < HEAD)[None, :]
        k = tl.load(paged.k_cache + slot[:, None] * HEAD + at[None, :], mask=mask, other=0.0).to(q.dtype)
        mask = valid[:, None] & (at_v < HEAD_V)[None, :]
        v = tl.load(paged.v_cache + slot[:, None] * HEAD_V + at_v[None, :], mask=mask, other=0.0).to(q.dtype)
        score = dot(q, tl.trans(k), tl.zeros((GROUP, KEYS), dtype=tl.float32), PRECISION) * scores.scale
        score = tl.where(valid[None, :], _capped(score, scores.softcap) * LOG2E, float("-inf"))
        grown = tl.maximum(largest, tl.max(score, 1))
        p = tl.exp2(score - grown[:, None])
        shrink = tl.exp2(largest - grown)
        total = total * shrink + tl.sum(p, 1)
        out = dot(p.to(v.dtype), v, out * shrink[:, None], PRECISION)
        largest = grown
    part = (row * sizes.heads + head) * sizes.splits + split
    if ALONE:
        if paged.sinks is not None:
            sink = tl.load(paged.sinks + head, mask=member < group, other=0.0).to(tl.float32) * LOG2E
            total += tl.exp2(sink - tl.where(largest == float("-inf"), sink, largest))
    else:
        lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(paged.lses + part, lse, mask=member < group)
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    columns = tl.where(begin < end, HEAD_V, 0)  # a part without keys is not read
    if ALONE:
        columns = HEAD_V
    out_mask = (member < group)[:, None] & (at_v < columns)[None, :]
    where = part[:, None] * HEAD_V + at_v[None, :]
    tl.store(paged.parts + where, out.to(paged.parts.dtype.element_ty), mask=out_mask)


@triton.jit
def _merge(
    paged, out_ptr, sizes, SPLITS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    """One head of one query row: parts [splits, Hv] weighted by their log-sum-exps; zeros without keys."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    lse = tl.load(paged.lses + at * sizes.splits + split, mask=split < sizes.splits, other=float("-inf"))
    largest = tl.max(lse, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp2(lse - largest)
    total = tl.sum(weight, 0)
    if paged.sinks is not None:
        total += tl.exp2(tl.load(paged.sinks + at % sizes.heads).to(tl.float32) * LOG2E - largest)
    mask = (lse > float("-inf"))[:, None] & (column < HEAD)[None, :]
    where = (at * sizes.splits + split)[:, None] * HEAD + column[None, :]
    parts = tl.load(paged.parts + where, mask=mask, other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + at * HEAD + column, out.to(out_ptr.dtype.element_ty), mask=column < HEAD)


def _paged_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write rows [T, Nkv, any] into caches [blocks, block_size, Nkv, any] (contiguous) at slots [T] but negative."""
    if not len(slots):
        return
    both = []
    for cache, rows in ((k_cache, keys), (v_cache, values)):
        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        both.append(Appended(rows, rows.stride(0), rows.stride(1), cache, rows.shape[1] * rows.shape[2]))
    most = max(appended.columns for appended in both)
    block = max(min(power_of_2(most), 2048), 16)
    launch = _append[(len(slots), triton.cdiv(most, block), 2)]  # pyright: ignore[reportIndexIssue]
    heads = {"HEAD": max(keys.shape[2], 1), "HEAD_V": max(values.shape[2], 1)}
    launch(*both, slots.contiguous(), **heads, BLOCK=block, **pdl_options(keys.device))


def form_of(dtype: torch.dtype, wide: int) -> tuple[int, int, int]:
    """Return the keys of a step, the warps of a program and the steps whose loads are under way.

    Args:
        dtype: the dtype of queries.
        wide: numbers of a head, a power of two.
    """
    keys = KEYS // (2 if wide > 128 else 1)
    if dtype == torch.float32:
        return keys // 2, 8 if wide > 64 else 4, 1
    return keys, 4, 3


def splits_of(rows: int, key_heads: int, keys: int, device: torch.device) -> int:
    """Return into how many parts the keys of a row are split, so that all multiprocessors have programs.

    Args:
        rows: query rows.
        key_heads: heads of keys; each row and head has programs of its own.
        keys: the most keys that a row may have; a part has a step of them at least.
        device: the GPU.
    """
    programs = max(rows * key_heads, 1)
    if programs >= waves(device, 2):
        return 1  # there are enough, and nothing has to be merged
    splits = triton.cdiv(waves(device, PROGRAMS), programs)
    return max(1, min(splits, triton.cdiv(keys, KEYS), MAX_SPLITS))


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [T, N, H], one query a row, of which tables [T, most] has the blocks and lengths [T] the number of keys."""
    if q.stride(2) != 1:
        q = q.contiguous()
    (rows, heads, head), (_, block, key_heads, head_v) = q.shape, v_cache.shape
    out = q.new_empty(rows, heads, head_v)
    if out.numel() == 0:
        return out
    keys = tables.shape[1] * block
    splits = splits_of(rows, key_heads, keys if window is None else min(keys, window), q.device)
    parts = out if splits == 1 else q.new_empty(rows, heads, splits, head_v, dtype=torch.float32)
    lses = None if splits == 1 else q.new_empty(rows, heads, splits, dtype=torch.float32)
    pdl = pdl_options(q.device)
    wide, wide_v = (max(power_of_2(width), 16) for width in (head, head_v))
    step, warps, stages = form_of(q.dtype, wide)
    tables, lengths = tables.contiguous(), lengths.contiguous()
    paged = Paged(q, k_cache, v_cache, tables, lengths, sinks, parts, lses)
    sizes = Sizes(q.stride(0), q.stride(1), heads, key_heads, block, tables.shape[1], splits)
    scores = Scores(scale, 2**30 if window is None else window, float(softcap or 0))
    launch = _part[(rows, key_heads, splits)]  # pyright: ignore[reportIndexIssue]
    launch(
        paged, sizes, scores,
        GROUP=max(power_of_2(heads // key_heads), 16), KEYS=step,
        HEAD=head, WIDE=wide, HEAD_V=head_v, WIDE_V=wide_v, ALONE=splits == 1,
        PRECISION=dot_precision(q.dtype), num_warps=warps, num_stages=stages, **pdl,
    )  # fmt: skip
    if splits > 1:
        launch = _merge[(rows * heads,)]  # pyright: ignore[reportIndexIssue]
        launch(paged, out, sizes, SPLITS=power_of_2(splits), HEAD=head_v, WIDE=wide_v, num_warps=4, **pdl)
    return out


def _empty(q, k_cache, v_cache, *_):
    return q.new_empty(*q.shape[:2], v_cache.shape[3])


paged_append = define(_paged_append, mutates=("k_cache", "v_cache"))
paged_attention = define(_paged_attention, _empty)
