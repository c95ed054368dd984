"""The numbers a rank receives for one layer, and those it keeps for backward, in each mode: closed forms.

With p ranks and rings, a gather of parts x receives (p-1) |x|, a sum of x scattered over the ranks (p-1)/p |x|, a sum
of x for all of them twice that. A sum for each rank in turn receives (p-1)/p |x| on average, and so does a part that
each sends to all. For x [T, in] and W [out, in] of the whole layer:

    1d          column: 2 (p-1)/p T in, once for all that read the same     row: 2 (p-1)/p T out
    1d, cut     for the two places where the sequence is gathered and the two where it is scattered: 2 (p-1)/p T h each
    2d, q x q   (q-1)/q^2 (2 T out + 3 in out)
    2.5d        the same with T/d, and 2 (d-1)/d in out / q^2 for the depth d
    3d, l^3     (l-1)/l^3 (3 T in + 2 T out + 3 in out)

Three products by themselves, as Xu and You make them in 2d (arXiv:2104.05343), receive (q-1)/q^2 (3 T in + 3 in out):
here the gradient of the output is sent once for both products that read it. Bian et al. (arXiv:2105.14450) gather and
scatter in 3d what stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A layer of a decoder with grouped queries and a gated mlp, without biases.

    Args:
        tokens: samples times their length, of all ranks.
        hidden: features of the residual stream.
        inner: features of the mlp.
        shared: features of all key heads (or value heads).
    """

    tokens: int
    hidden: int
    inner: int
    shared: int

    def linears(self) -> Iterator[tuple[int, int]]:
        """(input features, output features) of every linear layer."""
        yield self.hidden, self.hidden
        yield self.hidden, self.shared
        yield self.hidden, self.shared
        yield self.hidden, self.hidden
        yield self.hidden, self.inner
        yield self.hidden, self.inner
        yield self.inner, self.hidden


NORMS = 2
"""The norms of a layer; each has one weight [hidden] and one statistic a token, sent as two numbers."""


SUMS = 4
"""The sums of a layer in 1d: of what attention and mlp read, in backward, and of what they make, in forward."""


def received(mode: str, layer: Layer, ranks: int, *, depth: int = 1, sequence: bool = False) -> float:
    """Numbers that a rank receives in a layer's forward and backward, on average over the ranks.

    Args:
        mode: "1d", "2d", "2.5d" or "3d".
        ranks: the number of all ranks; q x q, depth x q x q, l x l x l.
        sequence: whether the stream is cut along the sequence, in 1d.
    """
    if mode == "1d":
        return _one_d(layer, ranks, sequence)
    if mode == "3d":
        return _three_d(layer, round(ranks ** (1 / 3)))
    return _two_d(layer, round((ranks / depth) ** 0.5), depth)


def kept(mode: str, layer: Layer, ranks: int, *, sequence: bool = False) -> float:
    """Numbers of activations that a rank keeps of a layer from its forward to its backward.

    Of the stream, for each norm: what comes in, that by its size, and what the layers behind it take in. Within:
    queries, keys, values and what attention makes of them; what the mlp makes of both its inputs, the one after its
    function, and their product. A grid cuts all of it over all ranks, 1d what is within, `sequence` the stream as well,
    but for what is gathered for the layers behind a norm. A few numbers a token, of norms and attention, are left out.

    Args: those of `received`.
    """
    stream = NORMS * 2 * layer.hidden
    gathered = NORMS * layer.hidden
    within = 2 * layer.hidden + 2 * layer.shared + 4 * layer.inner
    if mode != "1d":
        return layer.tokens * (stream + gathered + within) / ranks
    return layer.tokens * (stream / (ranks if sequence else 1) + gathered + within / ranks)


def _one_d(layer: Layer, p: int, sequence: bool) -> float:
    numbers = SUMS * layer.tokens * layer.hidden + (NORMS * layer.hidden if sequence else 0)
    return 2 * (p - 1) / p * numbers


def _two_d(layer: Layer, q: int, depth: int) -> float:
    tokens, numbers = layer.tokens / depth, 0.0
    for n, m in layer.linears():
        numbers += (q - 1) / q**2 * (2 * tokens * m + 3 * n * m)
        numbers += 2 * (depth - 1) / depth * n * m / q**2
    return numbers + _norms(layer, features=q, samples=depth * q)


def _three_d(layer: Layer, side: int) -> float:
    numbers = 0.0
    for n, m in layer.linears():
        numbers += (side - 1) / side**3 * (3 * layer.tokens * n + 2 * layer.tokens * m + 3 * n * m)
    return numbers + _norms(layer, features=side, samples=side**2)


def _norms(layer: Layer, *, features: int, samples: int) -> float:
    """Two numbers a token gathered, two summed over the ranks that share features; and the weight's gradient."""
    tokens = layer.tokens / samples
    statistics = (features - 1) * 2 * tokens + 2 * (features - 1) / features * 2 * tokens
    return NORMS * (statistics + 2 * (samples - 1) / samples * layer.hidden / features)
