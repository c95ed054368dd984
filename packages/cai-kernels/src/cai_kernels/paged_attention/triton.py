"""Attention over a paged cache in Triton: the keys of a query are split over programs, then the parts merge."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import dot_precision, power_of_2, waves
from cai_kernels.ops import define
from cai_kernels.tiles import dot

KEYS = 64  # the most keys of a step
MAX_SPLITS = 64
LOG2E = tl.constexpr(1.4426950408889634)


class Paged(NamedTuple):
    """q [T, N, H], caches [blocks, block_size, Nkv, H], tables [B, most], sequence and lengths [T], the parts."""

    q: object
    k_cache: object
    v_cache: object
    tables: object
    sequence: object
    lengths: object
    parts: object  # [T, N, splits, H] float32
    lses: object  # [T, N, splits] float32, base 2


class Sizes(NamedTuple):
    """Heads of queries and keys, block size, blocks a table has room for, splits and keys of each."""

    heads: int
    key_heads: int
    block: int
    most: int
    splits: int
    split_keys: int


@triton.jit
def _append(rows_ptr, slots_ptr, cache_ptr, columns, stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rows_ptr + token * stride + at, mask=at < columns, other=0.0)
    inside = at < tl.where(slot >= 0, columns, 0)
    tl.store(cache_ptr + slot * columns + at, value.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _part(
    paged, sizes, scale,
    GROUP: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query row, the query heads of one key head, one split of the keys: its attention and log-sum-exp."""
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = sizes.heads // sizes.key_heads
    member = tl.arange(0, GROUP)
    at = tl.arange(0, WIDE)
    head = key_head * group + member
    q_mask = (member < group)[:, None] & (at < HEAD)[None, :]
    q = tl.load(paged.q + (row * sizes.heads + head[:, None]) * HEAD + at[None, :], mask=q_mask, other=0.0)
    length = tl.load(paged.lengths + row)
    table = paged.tables + tl.load(paged.sequence + row).to(tl.int64) * sizes.most
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    out = tl.zeros((GROUP, WIDE), dtype=tl.float32)
    for first in range(split * sizes.split_keys, tl.minimum(length, (split + 1) * sizes.split_keys), KEYS):
        key = first + tl.arange(0, KEYS)
        valid = key < length
        block = tl.load(table + key // sizes.block, mask=valid, other=0).to(tl.int64)
        slot = (block * sizes.block + key % sizes.block) * sizes.key_heads + key_head
        where = slot[:, None] * HEAD + at[None, :]
        mask = valid[:, None] & (at < HEAD)[None, :]
        k = tl.load(paged.k_cache + where, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(paged.v_cache + where, mask=mask, other=0.0).to(q.dtype)
        score = dot(q, tl.trans(k), tl.zeros((GROUP, KEYS), dtype=tl.float32), PRECISION) * (scale * LOG2E)
        score = tl.where(valid[None, :], score, float("-inf"))
        grown = tl.maximum(largest, tl.max(score, 1))
        p = tl.exp2(score - grown[:, None])
        shrink = tl.exp2(largest - grown)
        total = total * shrink + tl.sum(p, 1)
        out = dot(p.to(v.dtype), v, out * shrink[:, None], PRECISION)
        largest = grown
    total = tl.where(total == 0.0, 1.0, total)
    part = (row * sizes.heads + head) * sizes.splits + split
    tl.store(paged.lses + part, largest + tl.log2(total), mask=member < group)
    tl.store(paged.parts + part[:, None] * HEAD + at[None, :], out / total[:, None], mask=q_mask)


@triton.jit
def _merge(
    parts_ptr, lses_ptr, out_ptr, splits, SPLITS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr
):
    """One head of one query row: parts [splits, H] weighted by their log-sum-exps; zeros without keys."""
    at = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    lse = tl.load(lses_ptr + at * splits + split, mask=split < splits, other=float("-inf"))
    largest = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight, 0)
    mask = (split < splits)[:, None] & (column < HEAD)[None, :]
    where = (at * splits + split)[:, None] * HEAD + column[None, :]
    parts = tl.load(parts_ptr + where, mask=mask, other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + at * HEAD + column, out.to(out_ptr.dtype.element_ty), mask=column < HEAD)


def _paged_append(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows [T, N, H] into cache [blocks, block_size, N, H] (contiguous) at slots [T], not where negative."""
    columns = cache.shape[2] * cache.shape[3]
    if rows.numel() == 0:
        return
    if rows.stride()[1:] != (cache.shape[3], 1):
        rows = rows.contiguous()
    block = min(power_of_2(columns), 2048)
    launch = _append[(rows.shape[0], triton.cdiv(columns, block))]  # pyright: ignore[reportIndexIssue]
    launch(rows, slots.contiguous(), cache, columns, rows.stride(0), BLOCK=block)


def splits_of(rows: int, key_heads: int, most: int, device: torch.device) -> tuple[int, int]:
    """(splits, keys of each): enough programs for two on every multiprocessor, at least 256 keys a program."""
    target_splits = triton.cdiv(waves(device, 2), max(rows * key_heads, 1))
    splits = max(1, min(target_splits, most // 256, MAX_SPLITS))
    split_keys = triton.cdiv(triton.cdiv(most, splits), KEYS) * KEYS
    return max(1, triton.cdiv(most, max(split_keys, 1))), max(split_keys, KEYS)


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    sequence: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [T, N, H], one query a row, its sequence [T] and how many keys it sees [T]; see `reference.attention`."""
    q = q.contiguous()
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    (rows, heads, head), (_, block, key_heads, _) = q.shape, k_cache.shape
    splits, split_keys = splits_of(rows, key_heads, tables.shape[1] * block, q.device)
    parts = q.new_empty(rows, heads, splits, head, dtype=torch.float32)
    lses = q.new_empty(rows, heads, splits, dtype=torch.float32)
    wide = max(power_of_2(head), 16)
    warps, stages = (8 if wide > 64 else 4, 1) if q.dtype == torch.float32 else (4, 2)
    keys = KEYS // (2 if wide > 128 else 1) // (2 if q.dtype == torch.float32 else 1)
    launch = _part[(rows, key_heads, splits)]  # pyright: ignore[reportIndexIssue]
    launch(
        Paged(q, k_cache, v_cache, tables.contiguous(), sequence, lengths.contiguous(), parts, lses),
        Sizes(heads, key_heads, block, tables.shape[1], splits, split_keys), scale,
        GROUP=max(power_of_2(heads // key_heads), 16), KEYS=keys, HEAD=head, WIDE=wide,
        PRECISION=dot_precision(q.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    launch = _merge[(rows * heads,)]  # pyright: ignore[reportIndexIssue]
    launch(parts, lses, out, splits, SPLITS=power_of_2(splits), HEAD=head, WIDE=wide, num_warps=4)
    return out


def _empty(q, k_cache, v_cache, tables, sequence, lengths, scale):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


paged_append = define(_paged_append, mutates=("cache",))
paged_attention = define(_paged_attention, _empty)
