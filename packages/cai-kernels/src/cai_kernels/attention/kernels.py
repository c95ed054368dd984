"""Flash attention in Triton (Dao, arXiv:2307.08691), with what torch's operators cannot do.

One set of kernels takes a bias that rows of a batch share, a mask of keys, a gate, a window, a soft cap, sequences of
any lengths and fewer heads of keys than of queries, and gives the log-sum-exp. Scores never reach memory. Every
gradient is summed by one program in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

from cai_kernels.compiler import tl, triton
from cai_kernels.tiles import dot

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Operands(NamedTuple):
    """q [Z, N, Sq, H], k and v [Z, Nkv, Sk, H], bias [Z / R, N, Sq, Sk], mask [Z, Sk], gate like q; None is allowed.

    With `query_starts` and `key_starts` [Z + 1] the sequences are packed: q [N, T, H], k and v [Nkv, Tk, H].
    """

    q: object
    k: object
    v: object
    bias: object
    mask: object
    gate: object
    query_starts: object
    key_starts: object


class Sizes(NamedTuple):
    """Longest sequences, heads of queries, query heads that share a key head, and batch rows that share a bias."""

    queries: int
    keys: int
    heads: int
    group: int
    rows: int
    lse_batch: int  # strides of lse and delta over the batch and heads
    lse_head: int


class Strides(NamedTuple):
    """Strides over batch, head and position; the last dim is contiguous. `other` is of out, dout or gradients."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    gate: tuple[int, int, int]
    out: tuple[int, int, int]


class Flags(NamedTuple):
    """The options that are compiled in. window 0: none; softcap 0: none."""

    causal: bool
    window: int
    softcap: float


class Head(NamedTuple):
    """One head of queries of one sequence: which, and how many queries and keys the sequence has."""

    batch: object
    number: object
    queries: object
    keys: object


class Blocks(NamedTuple):
    """Queries, keys and head dim of a tile, and the head dim itself."""

    queries: int
    keys: int
    wide: int
    head: int


@triton.jit
def span(starts, batch, longest):
    """(first position, length) of a sequence."""
    if starts is None:
        return batch * 0, longest
    else:
        first = tl.load(starts + batch)
        return first.to(tl.int64), (tl.load(starts + batch + 1) - first).to(tl.int32)


@triton.jit
def at_head(base, batch, head, first, strides):
    """Address of the first row of one head of one sequence."""
    return base + batch * strides[0] + head.to(tl.int64) * strides[1] + first * strides[2]


@triton.jit
def load_rows(base, row, length, stride, WIDE: tl.constexpr, HEAD: tl.constexpr):
    """A tile [rows, WIDE]; zeros past the sequence and past the head dim."""
    at = tl.arange(0, WIDE)
    inside = (row < length)[:, None]
    if WIDE != HEAD:
        inside = inside & (at < HEAD)[None, :]
    return tl.load(base + row.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, row, length, stride, value, WIDE: tl.constexpr, HEAD: tl.constexpr):
    """Write a tile [rows, WIDE] inside the sequence and the head dim."""
    at = tl.arange(0, WIDE)
    inside = (row < length)[:, None]
    if WIDE != HEAD:
        inside = inside & (at < HEAD)[None, :]
    where = base + row.to(tl.int64)[:, None] * stride + at[None, :]
    tl.store(where, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x, ROUNDED: tl.constexpr):
    """Tanh to a few float32 roundings, near zero too; ROUNDED (16-bit operands): to 2e-7, in a third of the time."""
    if ROUNDED:
        root = tl.rsqrt(1.0 + tl.exp2(x * (2.0 * LOG2E)))
        return 1.0 - 2.0 * (root * root)
    else:
        square = x * x
        series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        far = (1.0 - decay) / (1.0 + decay)
        return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def logits(product, scale, operands, sizes, head, row, column, FLAGS: tl.constexpr):
    """Scores in base 2 from q·k, and tanh of the soft cap. row and column broadcast to the tile.

    Rows past the end give scores like any other: none is stored, and their lse makes probabilities zero.
    """
    queries, keys = head.queries, head.keys
    bent = product
    if FLAGS.softcap != 0.0:
        bent = tanh(product * (scale / FLAGS.softcap), operands.q.dtype.element_ty != tl.float32)
        score = bent * (FLAGS.softcap * LOG2E)
    else:
        score = product * (scale * LOG2E)
    if operands.bias is not None:
        shared = head.batch // sizes.rows * sizes.heads + head.number
        base = operands.bias + shared * sizes.queries * sizes.keys
        inside = (column < keys) & (row < queries)
        bias = tl.load(base + row.to(tl.int64) * sizes.keys + column, mask=inside, other=0.0)
        score += bias.to(tl.float32) * LOG2E
    if operands.mask is not None:
        mask = tl.load(operands.mask + head.batch * sizes.keys + column, mask=column < keys, other=0.0)
        score += mask.to(tl.float32) * LOG2E
    visible = column < keys
    if FLAGS.causal:
        visible = visible & (column <= row + (keys - queries))
    if FLAGS.window != 0:
        visible = visible & (column > row + (keys - queries) - FLAGS.window)
        if not FLAGS.causal:
            visible = visible & (column < row + (keys - queries) + FLAGS.window)
    return tl.where(visible, score, float("-inf")), bent


@triton.jit
def score_keys(
    q, k_base, v_base, scale, operands, sizes, strides, head, row, column,
    FLAGS: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(keys, values, scores of queries over these keys, tanh of the soft cap) of one block of keys."""
    QUERIES: tl.constexpr = BLOCKS.queries
    KEYS: tl.constexpr = BLOCKS.keys
    WIDE: tl.constexpr = BLOCKS.wide
    HEAD: tl.constexpr = BLOCKS.head
    k = load_rows(k_base, column, head.keys, strides.k[2], WIDE, HEAD)
    v = load_rows(v_base, column, head.keys, strides.v[2], WIDE, HEAD)
    product = dot(q, tl.trans(k), tl.zeros((QUERIES, KEYS), dtype=tl.float32), PRECISION)
    score, bent = logits(product, scale, operands, sizes, head, row[:, None], column[None, :], FLAGS)
    return k, v, score, bent


@triton.jit
def key_range(first, queries, keys, FLAGS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Keys that a tile of queries starting at `first` can see: from a multiple of KEYS, to an end."""
    low = 0
    high = keys
    if FLAGS.causal:
        high = tl.minimum(keys, first + QUERIES + keys - queries)
    if FLAGS.window != 0:
        low = tl.maximum(first + keys - queries - FLAGS.window + 1, 0) // KEYS * KEYS
        if not FLAGS.causal:
            high = tl.minimum(keys, first + QUERIES + keys - queries + FLAGS.window - 1)
    return low, high


@triton.jit
def query_range(first, queries, keys, FLAGS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Queries that can see a tile of keys starting at `first`: from a multiple of QUERIES, to an end."""
    low = 0
    high = queries
    if FLAGS.causal:
        low = tl.maximum(first - (keys - queries), 0) // QUERIES * QUERIES
    if FLAGS.window != 0:
        high = tl.minimum(queries, first + KEYS - (keys - queries) + FLAGS.window - 1)
        if not FLAGS.causal:
            low = tl.maximum(first - (keys - queries) - FLAGS.window + 1, 0) // QUERIES * QUERIES
    return low, high


@triton.jit
def forward(
    operands, out_ptr, lse_ptr, sizes, strides, scale,
    FLAGS: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: out, and lse in float32 (-inf where a query sees nothing; out is zero there)."""
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
        k_base = at_head(operands.k, batch, head // sizes.group, key_start, strides.k)
        v_base = at_head(operands.v, batch, head // sizes.group, key_start, strides.v)
        member = Head(batch, head, queries, keys)
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), dtype=tl.float32)
        out = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
        low, high = key_range(first, queries, keys, FLAGS, QUERIES, KEYS)
        for at in range(low, high, KEYS):
            column = at + tl.arange(0, KEYS)
            _, v, score, _ = score_keys(
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
            grown = tl.maximum(largest, tl.max(score, 1))
            base = tl.where(grown == float("-inf"), 0.0, grown)
            p = tl.exp2(score - base[:, None])
            shrink = tl.exp2(largest - base)
            total = total * shrink + tl.sum(p, 1)
            out = dot(p.to(v.dtype), v, out * shrink[:, None], PRECISION)
            largest = grown
        total = tl.where(total == 0.0, 1.0, total)
        out = out / total[:, None]
        if operands.gate is not None:
            gate_base = at_head(operands.gate, batch, head, start, strides.gate)
            gate = load_rows(gate_base, row, queries, strides.gate[2], WIDE, HEAD).to(tl.float32)
            out *= 1.0 / (1.0 + tl.exp2(gate * -LOG2E))
        out_base = at_head(out_ptr, batch, head, start, strides.out)
        store_rows(out_base, row, queries, strides.out[2], out, WIDE, HEAD)
        lse_at = lse_ptr + batch * sizes.lse_batch + head.to(tl.int64) * sizes.lse_head + start + row
        tl.store(lse_at, (largest + tl.log2(total)) * LN2, mask=row < queries)
