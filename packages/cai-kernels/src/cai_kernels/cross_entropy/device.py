"""What the kernels of cross-entropy share: one row scanned, its loss, the gradient of a tile of it.

A row is scanned with the online softmax (Milakov and Gimelshein, arXiv:1805.02867), each lane with a maximum and a sum
of its own, so that nothing crosses threads before the row ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN, LOGIT_SUM, ENTROPY = 0, 1, 2  # what a scan keeps beside maximum and sum of exponentials

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOGIT_SUM, _ENTROPY = tl.constexpr(LOGIT_SUM), tl.constexpr(ENTROPY)


@triton.jit
def _tanh(u):
    square = u * u
    series = ((-0.00570399244 * square + 0.0206378184) * square - 0.0537391439) * square + 0.133314316
    small = u + u * square * (series * square - 0.333332813)
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(u)) + 1.0)
    return tl.where(tl.abs(u) < 0.625, small, tl.where(u < 0.0, -large, large))


@triton.jit
def row_offset(row, shape):
    """Where row `row` of [outer, inner, columns] begins; shape is (inner, stride of outer, stride of inner)."""
    return (row // shape[0]) * shape[1] + (row % shape[0]) * shape[2]


@triton.jit
def scan_row(
    x_ptr, columns, softcap, AUX: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """(maximum, sum of exp(x - maximum), auxiliary) of one row of `columns` logits.

    The auxiliary is the sum of the logits (LOGIT_SUM) or the sum of exp(x - maximum) * (x - maximum) (ENTROPY).
    """
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), _LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    extra = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        inside = start + at < columns
        x = tl.load(x_ptr + start + at, mask=inside, other=-float("inf")).to(tl.float32)
        if CAP:
            x = tl.where(inside, softcap * _tanh(x / softcap), -float("inf"))
        above = x - top
        grew = above > 0.0
        e = tl.exp(-tl.abs(above))
        if AUX == _ENTROPY:
            seen = tl.where(e > 0.0, e * above, 0.0)
            extra = tl.where(grew, tl.where(e > 0.0, e * (extra - total * above), 0.0), extra + seen)
        if AUX == _LOGIT_SUM:
            extra += tl.where(inside, x, 0.0)
        total = tl.where(grew, total * e + 1.0, total + e)
        top = tl.maximum(top, x)
    maximum = tl.max(top, 0)
    factor = tl.exp(top - maximum)
    if AUX == _ENTROPY:
        extra = tl.where(total > 0.0, factor * (extra + total * (top - maximum)), 0.0)
    return maximum, tl.sum(total * factor, 0), tl.sum(extra, 0)


@triton.jit
def target_logit(x_ptr, target, columns, softcap, CAP: tl.constexpr):
    """The logit of `target`, 0 where it is not among these columns."""
    here = (target >= 0) & (target < columns)
    x = tl.load(x_ptr + tl.where(here, target, 0), mask=here, other=0.0).to(tl.float32)
    if CAP:
        x = softcap * _tanh(x / softcap)
    return tl.where(here, x, 0.0)


@triton.jit
def slopes(x, at, target, row, terms, AUX: tl.constexpr, CAP: tl.constexpr):
    """The gradient of a tile of logits `x` at columns `at`.

    row is (maximum, sum of exponentials, auxiliary, upstream of the loss, upstream of the entropy), terms
    (label smoothing, smoothing over the size of the vocabulary, z-loss, softcap).
    """
    top, total, extra, upstream, of_entropy = row
    smoothing, share, z_loss, softcap = terms
    logsum = tl.log(total)
    bent = x
    if CAP:
        bent = _tanh(x / softcap)
        x = softcap * bent
    p = tl.exp(x - top) * (1.0 / total)
    g = upstream * (p * (1.0 + 2.0 * z_loss * (top + logsum)) - share)
    g = tl.where(at == target, g - upstream * (1.0 - smoothing), g)
    if AUX == _ENTROPY:
        surprise = x - top - extra / total  # log p + entropy
        g -= tl.where(p > 0.0, of_entropy * p * surprise, 0.0)
    if CAP:
        g *= 1.0 - bent * bent
    return g


@triton.jit
def row_loss(top, total, aimed, logit_sum, columns, smoothing, z_loss):
    """(loss, z-loss) of rows: the loss includes the z-loss. Each term is a difference to the maximum."""
    logsum = tl.log(total)
    z = z_loss * (top + logsum) * (top + logsum)
    likely = (1.0 - smoothing) * (top - aimed)
    return logsum + likely + smoothing * (top - logit_sum / columns) + z, z
