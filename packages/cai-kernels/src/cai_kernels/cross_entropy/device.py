"""Triton functions that the kernels of cross-entropy share: the scan of a row, its loss, the gradient of a tile.

A row is scanned with the online softmax (Milakov and Gimelshein, arXiv:1805.02867). Each lane has its own maximum and
sum, so threads exchange nothing before the end of the row, and a lane rescales once per 16 bytes of logits.
"""

from __future__ import annotations

from typing import NamedTuple

from cai_kernels.compiler import tl, triton
from cai_kernels.cross_entropy.options import ENTROPY, LOGIT_SUM, PLAIN
from cai_kernels.tiles import exp

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_PLAIN, _LOGIT_SUM, _ENTROPY = tl.constexpr(PLAIN), tl.constexpr(LOGIT_SUM), tl.constexpr(ENTROPY)


class Row(NamedTuple):
    """The values that the gradient of a row of logits needs.

    Args:
        maximum: the largest logit.
        sum_exp: sum of exp(logit - maximum).
        extra: the auxiliary of `scan_row`.
        upstream: gradient of the loss.
        of_entropy: gradient of the entropy.
    """

    maximum: object
    sum_exp: object
    extra: object
    upstream: object
    of_entropy: object


@triton.jit
def _tanh(u):
    square = u * u
    series = ((-0.00570399244 * square + 0.0206378184) * square - 0.0537391439) * square + 0.133314316
    small = u + u * square * (series * square - 0.333332813)
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(u)) + 1.0)
    return tl.where(tl.abs(u) < 0.625, small, tl.where(u < 0.0, -large, large))


@triton.jit
def row_offset(row, shape):
    """Offset of row `row` of [outer, inner, columns]; shape is (inner, stride of outer, stride of inner)."""
    return (row // shape[0]) * shape[1] + (row % shape[0]) * shape[2]


@triton.jit
def merge_tile(state, x, inside, softcap, AXIS: tl.constexpr, AUX: tl.constexpr, CAP: tl.constexpr):
    """Add a tile of logits to the lanes' (maximum, sum, auxiliary). Logits not `inside` count as -inf; None: all are.

    With a cap, maxima and sums of logits are divided by the cap until `end_scan`, so that differences come before
    products: with a fused multiply-subtract the maximum minus itself would not be 0.
    """
    top, total, extra = state
    if CAP:
        bent = _tanh(x / softcap)
        x = bent if inside is None else tl.where(inside, bent, -float("inf"))
    higher = tl.maximum(top, tl.max(x, AXIS))
    below = x - tl.expand_dims(higher, AXIS)
    sunk = top - higher
    if CAP:
        below *= softcap
        sunk *= softcap
    e = exp(below)
    factor = exp(sunk)
    if AUX == _ENTROPY:
        before = tl.where(total > 0.0, extra + total * sunk, 0.0)
        extra = factor * before + tl.sum(tl.where(e > 0.0, e * below, 0.0), AXIS)
    if AUX == _LOGIT_SUM:
        # minus the sum of minus x, which costs nothing: Triton 3.6 fails to compile the sum of what a loop has loaded
        extra -= tl.sum((x if inside is None else tl.where(inside, x, 0.0)) * -1.0, AXIS)
    return higher, total * factor + tl.sum(e, AXIS), extra


@triton.jit
def start_scan(LANES: tl.constexpr):
    """The initial (maximum, sum of exponentials, auxiliary) of the lanes."""
    nothing = tl.zeros((LANES,), dtype=tl.float32)
    return tl.full((LANES,), _LOWEST, dtype=tl.float32), nothing, nothing


@triton.jit
def end_scan(state, softcap, AUX: tl.constexpr, CAP: tl.constexpr):
    """Merge the lanes' (maximum, sum of exponentials, auxiliary) into those of the row."""
    top, total, extra = state
    maximum = tl.max(top, 0)
    sunk = top - maximum
    if CAP:
        sunk *= softcap
    factor = exp(sunk)
    if AUX == _ENTROPY:
        extra = tl.where(total > 0.0, factor * (extra + total * sunk), 0.0)
    total = tl.sum(total * factor, 0)
    extra = tl.full((), 0.0, tl.float32) if AUX == _PLAIN else tl.sum(extra, 0)
    if CAP:
        maximum = tl.where(total > 0.0, maximum * softcap, maximum)
        if AUX == _LOGIT_SUM:
            extra *= softcap
    return maximum, total, extra


@triton.jit
def scan_row(
    x_ptr,
    columns,
    softcap,
    AUX: tl.constexpr,
    CAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(maximum, sum of exp(x - maximum), auxiliary) of one row of `columns` logits.

    The auxiliary is the sum of the logits (LOGIT_SUM) or the sum of exp(x - maximum) * (x - maximum) (ENTROPY).
    ALIGNED: rows begin at multiples of 16 bytes, and a lane loads 16 bytes at once; else neighbours go to other lanes.
    """
    EACH: tl.constexpr = min(128 // x_ptr.dtype.element_ty.primitive_bitwidth, BLOCK)
    LANES: tl.constexpr = BLOCK // EACH
    if ALIGNED:
        AXIS: tl.constexpr = 1
        at = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    else:
        AXIS: tl.constexpr = 0
        at = tl.arange(0, EACH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    state = start_scan(LANES)
    tiled_columns = columns // BLOCK * BLOCK
    inside = tiled_columns + at < columns
    tail = tl.load(
        x_ptr + tiled_columns + at, mask=inside, other=-float("inf")
    )  # waited for after the whole tiles
    for start in tl.range(0, tiled_columns, BLOCK, num_stages=STAGES):
        x = tl.load(x_ptr + start + at).to(tl.float32)
        state = merge_tile(state, x, None, softcap, AXIS, AUX, CAP)
    if tiled_columns < columns:
        state = merge_tile(state, tail.to(tl.float32), inside, softcap, AXIS, AUX, CAP)
    return end_scan(state, softcap, AUX, CAP)


@triton.jit
def load_target(x_ptr, target, columns):
    """The logit of `target` as it lies in memory, 0 where it is not among these columns."""
    is_local = (target >= 0) & (target < columns)
    return tl.load(x_ptr + tl.where(is_local, target, 0), mask=is_local, other=0.0)


@triton.jit
def target_logit(x_ptr, target, columns, softcap, CAP: tl.constexpr):
    """The logit of `target`, 0 where it is not among these columns."""
    return capped(load_target(x_ptr, target, columns), softcap, CAP)


@triton.jit
def capped(x, softcap, CAP: tl.constexpr):
    x = x.to(tl.float32)
    return softcap * _tanh(x / softcap) if CAP else x


@triton.jit
def place_of(target, columns):
    """The column of the target as 32-bit integer, -1 if it is not among these columns."""
    return tl.where((target >= 0) & (target < columns), target, -1).to(tl.int32)


@triton.jit
def slopes(x, at, place, row, terms, AUX: tl.constexpr, CAP: tl.constexpr):
    """The gradient of a tile of logits `x` at columns `at`; `place` is the target's, see `place_of`.

    row is a `Row`, terms are (label smoothing, smoothing over the size of the vocabulary, z-loss or None, softcap).
    """
    smoothing, share, z_loss, softcap = terms
    inverse = 1.0 / row.sum_exp
    bent = x
    if CAP:
        bent = _tanh(x / softcap)
        x = softcap * bent
    e = exp(x - row.maximum)
    weight = row.upstream * inverse
    if z_loss is not None:
        weight *= 1.0 + 2.0 * z_loss * (row.maximum + tl.log(row.sum_exp))
    g = e * weight - row.upstream * share
    g = tl.where(at == place, g - row.upstream * (1.0 - smoothing), g)
    if AUX == _ENTROPY:
        p = e * inverse
        surprise = x - row.maximum - row.extra * inverse  # log p + entropy
        g -= tl.where(p > 0.0, row.of_entropy * p * surprise, 0.0)
    if CAP:
        g *= 1.0 - bent * bent
    return g


@triton.jit
def row_loss(top, total, aimed, logit_sum, columns, smoothing, z_loss):
    """(loss with the z-loss in it, z-loss) of rows. Each term of the loss is a difference to the maximum."""
    logsum = tl.log(total)
    z = z_loss * (top + logsum) * (top + logsum)
    likely = (1.0 - smoothing) * (top - aimed)
    return logsum + likely + smoothing * (top - logit_sum / columns) + z, z
