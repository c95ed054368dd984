"""Gradients of the flash attention in `kernels`: scores are computed again, and one program computes each sum."""

from __future__ import annotations

from typing import NamedTuple

from cai_kernels.attention.kernels import (
    LOG2E,
    Head,
    at_head,
    key_range,
    load_rows,
    logits,
    query_range,
    score_keys,
    span,
    store_rows,
)
from cai_kernels.compiler import tl, triton
from cai_kernels.tiles import dot


class Upstream(NamedTuple):
    """Gradient of the attention before the gate (strides `Strides.out`), lse, and delta: dout · out - dlse."""

    dout: object
    lse: object
    delta: object


class Prepared(NamedTuple):
    """Pointers. Read are out, dout and the gradient of lse; written are delta and, with a gate, the gradients before it
    and of it, like out."""

    out: object
    dout: object
    dlse: object
    delta: object
    dattention: object
    dgate: object


@triton.jit
def prepared_rows(
    operands, prepared, sizes, strides, dout_strides, batch, head, start, row, queries, BLOCKS: tl.constexpr
):
    """(gradient before the gate, delta) of rows of queries, which are kept too.

    With out gated, dgate = dout * out * (1 - sigmoid) and delta needs no division.
    """
    WIDE: tl.constexpr = BLOCKS.wide
    HEAD: tl.constexpr = BLOCKS.head
    out_base = at_head(prepared.out, batch, head, start, strides.out)
    dout_base = at_head(prepared.dout, batch, head, start, dout_strides)
    out = load_rows(out_base, row, queries, strides.out[2], WIDE, HEAD).to(tl.float32)
    dattention = load_rows(dout_base, row, queries, dout_strides[2], WIDE, HEAD)
    dout = dattention.to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = batch * sizes.lse_batch + head.to(tl.int64) * sizes.lse_head + start + row
    if prepared.dlse is not None:
        delta -= tl.load(prepared.dlse + at, mask=row < queries, other=0.0)
    tl.store(prepared.delta + at, delta, mask=row < queries)
    if operands.gate is not None:
        gate_base = at_head(operands.gate, batch, head, start, strides.gate)
        gate = load_rows(gate_base, row, queries, strides.gate[2], WIDE, HEAD).to(tl.float32)
        opened = 1.0 / (1.0 + tl.exp2(gate * -LOG2E))
        shut = 1.0 / (1.0 + tl.exp2(gate * LOG2E))
        dgate_base = at_head(prepared.dgate, batch, head, start, strides.out)
        store_rows(dgate_base, row, queries, strides.out[2], dout * out * shut, WIDE, HEAD)
        dattention = (dout * opened).to(dattention.dtype)
        dattention_base = at_head(prepared.dattention, batch, head, start, strides.out)
        store_rows(dattention_base, row, queries, strides.out[2], dattention, WIDE, HEAD)
    return dattention, delta


@triton.jit
def prepare(operands, prepared, sizes, strides, dout_strides, BLOCKS: tl.constexpr):
    """`prepared_rows` of one tile of queries of one head."""
    batch = (tl.program_id(1) // sizes.heads).to(tl.int64)
    head = tl.program_id(1) % sizes.heads
    start, queries = span(operands.query_starts, batch, sizes.queries)
    row = tl.program_id(0) * BLOCKS.queries + tl.arange(0, BLOCKS.queries)
    prepared_rows(operands, prepared, sizes, strides, dout_strides, batch, head, start, row, queries, BLOCKS)


@triton.jit
def saved_rows(upstream, sizes, batch, head, start, row, queries, READY: tl.constexpr):
    """(lse in base 2, delta) of rows; lse is inf where a row sees nothing, which makes its probabilities zero.

    READY: delta is there; else zeros stand for it.
    """
    at = batch * sizes.lse_batch + head.to(tl.int64) * sizes.lse_head + start + row
    lse = tl.load(upstream.lse + at, mask=row < queries, other=float("-inf"))
    delta = tl.zeros_like(lse)
    if READY:
        delta = tl.load(upstream.delta + at, mask=row < queries, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), delta


@triton.jit
def dscores(score, bent, lse, dp, delta, FLAGS: tl.constexpr):
    """(probabilities, gradient of the score after the cap, gradient of the score before it)."""
    p = tl.exp2(score - lse)
    ds = p * (dp - delta)
    if FLAGS.softcap != 0.0:
        return p, ds, ds * (1.0 - bent * bent)
    else:
        return p, ds, ds


@triton.jit
def queries_backward(
    operands, prepared, upstream, dq_ptr, sizes, strides, dout_strides, dq_strides, scale,
    FLAGS: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head; where FUSED, its `prepared_rows` too, for what follows."""
    QUERIES: tl.constexpr = BLOCKS.queries
    KEYS: tl.constexpr = BLOCKS.keys
    WIDE: tl.constexpr = BLOCKS.wide
    HEAD: tl.constexpr = BLOCKS.head
    batch = (tl.program_id(1) // sizes.heads).to(tl.int64)
    head = tl.program_id(1) % sizes.heads
    start, queries = span(operands.query_starts, batch, sizes.queries)
    key_start, keys = span(operands.key_starts, batch, sizes.keys)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest first, if causal
    if first < queries:
        row = first + tl.arange(0, QUERIES)
        q = load_rows(
            at_head(operands.q, batch, head, start, strides.q), row, queries, strides.q[2], WIDE, HEAD
        )
        lse, delta = saved_rows(upstream, sizes, batch, head, start, row, queries, not FUSED)
        if not FUSED:
            dout_base = at_head(upstream.dout, batch, head, start, strides.out)
            dout = load_rows(dout_base, row, queries, strides.out[2], WIDE, HEAD)
        else:
            dout, delta = prepared_rows(
                operands, prepared, sizes, strides, dout_strides, batch, head, start, row, queries, BLOCKS
            )
        k_base = at_head(operands.k, batch, head // sizes.group, key_start, strides.k)
        v_base = at_head(operands.v, batch, head // sizes.group, key_start, strides.v)
        member = Head(batch, head, queries, keys)
        dq = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
        low, high = key_range(first, queries, keys, FLAGS, QUERIES, KEYS)
        for at in range(low, high, KEYS):
            column = at + tl.arange(0, KEYS)
            k, v, score, bent = score_keys(
                q,
                k_base,
                v_base,
                scale,
                operands,
                sizes,
                strides,
                member,
                row,
                column,
                FLAGS,
                BLOCKS,
                PRECISION,
            )
            dp = dot(dout, tl.trans(v), tl.zeros((QUERIES, KEYS), dtype=tl.float32), PRECISION)
            _, _, ds = dscores(score, bent, lse[:, None], dp, delta[:, None], FLAGS)
            dq = dot(ds.to(k.dtype), k, dq, PRECISION)
        dq_base = at_head(dq_ptr, batch, head, start, dq_strides)
        store_rows(dq_base, row, queries, dq_strides[2], dq * scale, WIDE, HEAD)


@triton.jit
def keys_backward(
    operands, upstream, results, sizes, strides, result_strides, scale,
    FLAGS: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one head of keys: over its query heads, then over the queries."""
    QUERIES: tl.constexpr = BLOCKS.queries
    KEYS: tl.constexpr = BLOCKS.keys
    WIDE: tl.constexpr = BLOCKS.wide
    HEAD: tl.constexpr = BLOCKS.head
    key_heads = sizes.heads // sizes.group
    batch = (tl.program_id(1) // key_heads).to(tl.int64)
    key_head = tl.program_id(1) % key_heads
    start, queries = span(operands.query_starts, batch, sizes.queries)
    key_start, keys = span(operands.key_starts, batch, sizes.keys)
    first = tl.program_id(0) * KEYS
    if first < keys:
        column = first + tl.arange(0, KEYS)
        k_base = at_head(operands.k, batch, key_head, key_start, strides.k)
        v_base = at_head(operands.v, batch, key_head, key_start, strides.v)
        k = load_rows(k_base, column, keys, strides.k[2], WIDE, HEAD)
        v = load_rows(v_base, column, keys, strides.v[2], WIDE, HEAD)
        dk = tl.zeros((KEYS, WIDE), dtype=tl.float32)
        dv = tl.zeros((KEYS, WIDE), dtype=tl.float32)
        low, high = query_range(first, queries, keys, FLAGS, QUERIES, KEYS)
        for index in range(sizes.group):
            head = key_head * sizes.group + index
            member = Head(batch, head, queries, keys)
            q_base = at_head(operands.q, batch, head, start, strides.q)
            dout_base = at_head(upstream.dout, batch, head, start, strides.out)
            for at in range(low, high, QUERIES):
                row = at + tl.arange(0, QUERIES)
                q = load_rows(q_base, row, queries, strides.q[2], WIDE, HEAD)
                dout = load_rows(dout_base, row, queries, strides.out[2], WIDE, HEAD)
                lse, delta = saved_rows(upstream, sizes, batch, head, start, row, queries, True)
                product = dot(k, tl.trans(q), tl.zeros((KEYS, QUERIES), dtype=tl.float32), PRECISION)
                score, bent = logits(
                    product, scale, operands, sizes, member, row[None, :], column[:, None], FLAGS
                )
                dp = dot(v, tl.trans(dout), tl.zeros((KEYS, QUERIES), dtype=tl.float32), PRECISION)
                p, _, ds = dscores(score, bent, lse[None, :], dp, delta[None, :], FLAGS)
                dv = dot(p.to(dout.dtype), dout, dv, PRECISION)
                dk = dot(ds.to(q.dtype), q, dk, PRECISION)
        dk_base = at_head(results[0], batch, key_head, key_start, result_strides[0])
        store_rows(dk_base, column, keys, result_strides[0][2], dk * scale, WIDE, HEAD)
        dv_base = at_head(results[1], batch, key_head, key_start, result_strides[1])
        store_rows(dv_base, column, keys, result_strides[1][2], dv, WIDE, HEAD)


@triton.jit
def bias_backward(
    operands, upstream, partial_ptr, sizes, strides, scale, parts,
    FLAGS: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of [parts, Z / R, N, Sq, Sk]: the bias gradient of every P-th of the R batch rows that share it."""
    QUERIES: tl.constexpr = BLOCKS.queries
    KEYS: tl.constexpr = BLOCKS.keys
    WIDE: tl.constexpr = BLOCKS.wide
    HEAD: tl.constexpr = BLOCKS.head
    head = tl.program_id(1)
    queries, keys = sizes.queries, sizes.keys
    across = tl.cdiv(keys, KEYS)
    row = tl.program_id(0) // across * QUERIES + tl.arange(0, QUERIES)
    column = tl.program_id(0) % across * KEYS + tl.arange(0, KEYS)
    total = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
    entry = (tl.program_id(2) // parts).to(tl.int64)
    part = tl.program_id(2) % parts
    start = entry * 0
    for index in range(part, sizes.rows, parts):
        batch = entry * sizes.rows + index
        q = load_rows(
            at_head(operands.q, batch, head, start, strides.q), row, queries, strides.q[2], WIDE, HEAD
        )
        k_base = at_head(operands.k, batch, head // sizes.group, start, strides.k)
        v_base = at_head(operands.v, batch, head // sizes.group, start, strides.v)
        dout_base = at_head(upstream.dout, batch, head, start, strides.out)
        # `score_keys` written out: with keys and values loaded after dout, 384 queries of heads of 32 took 17 % longer.
        k = load_rows(k_base, column, keys, strides.k[2], WIDE, HEAD)
        v = load_rows(v_base, column, keys, strides.v[2], WIDE, HEAD)
        dout = load_rows(dout_base, row, queries, strides.out[2], WIDE, HEAD)
        lse, delta = saved_rows(upstream, sizes, batch, head, start, row, queries, True)
        product = dot(q, tl.trans(k), tl.zeros((QUERIES, KEYS), dtype=tl.float32), PRECISION)
        member = Head(batch, head, queries, keys)
        score, bent = logits(product, scale, operands, sizes, member, row[:, None], column[None, :], FLAGS)
        dp = dot(dout, tl.trans(v), tl.zeros((QUERIES, KEYS), dtype=tl.float32), PRECISION)
        _, ds, _ = dscores(score, bent, lse[:, None], dp, delta[:, None], FLAGS)
        total += ds
    entries = tl.num_programs(2) // parts
    base = partial_ptr + ((part * entries + entry) * sizes.heads + head) * queries * keys
    inside = (row < queries)[:, None] & (column < keys)[None, :]
    where = base + row.to(tl.int64)[:, None] * keys + column[None, :]
    tl.store(where, total.to(partial_ptr.dtype.element_ty), mask=inside)
