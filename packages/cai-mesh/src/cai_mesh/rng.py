"""Random numbers as a function of (seed, step, name, global index).

A value depends on the key and on the element's index in the global tensor, never on the rank that draws it, so
every layout draws the same numbers and a run resumed on another layout continues with the same ones. The generator
is SplitMix64 used as a counter-based hash (Steele, Lea, Flood, OOPSLA 2014, doi:10.1145/2714064.2660195).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from cai_mesh.layout.layout import Layout
from cai_mesh.layout.record import layout_of

_BLOCK = 1 << 22  # elements drawn at a time, which bounds the int64 scratch memory


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA, _MIX1, _MIX2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key(*parts: int | str) -> int:
    """A 64-bit key from a seed and anything else that names a stream (step, parameter name, purpose)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def bits(stream: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """64 random bits for every element of an int64 `index` tensor; of several keys, int64, where they broadcast."""
    z = (index + 1) * _GAMMA + stream
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, count: int) -> torch.Tensor:
    return (z >> count) & ((1 << (64 - count)) - 1)


def unit(stream: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Uniform float64 in the open interval (0, 1) for every element of `index`, of 2⁵² values; keys as for `bits`."""
    return (_shift(bits(stream, index), 12).to(torch.float64) + 0.5) * 2.0**-52


def _index_blocks(tensor: torch.Tensor, layout: Layout | None):
    """(view of `tensor`, global flat index of its elements) for blocks that cover it."""
    layout = layout or layout_of(tensor)
    stride = [math.prod(layout.global_shape[d + 1 :]) for d in range(len(layout.global_shape))]
    for where, box in layout.slices():
        part = tensor[where]
        rows = box.shape[0] if box.shape else 1
        step = max(1, _BLOCK // max(1, box.numel // max(rows, 1)))
        for low in range(0, rows, step):
            block = part[low : low + step] if box.shape else part
            index = torch.zeros((), dtype=torch.int64, device=tensor.device)
            for d, size in enumerate(block.shape):
                first = box.offset[d] + (low if d == 0 else 0)
                line = (torch.arange(size, device=tensor.device) + first) * stride[d]
                index = index.unsqueeze(-1) + line
            yield block, index


@torch.no_grad()
def uniform_(
    tensor: torch.Tensor, stream: int, low: float = 0.0, high: float = 1.0, *, layout: Layout | None = None
) -> torch.Tensor:
    """Fill a local tensor with its elements of a global uniform tensor."""
    for block, index in _index_blocks(tensor, layout):
        block.copy_(unit(stream, index) * (high - low) + low)
    return tensor


@torch.no_grad()
def normal_(
    tensor: torch.Tensor, stream: int, mean: float = 0.0, std: float = 1.0, *, layout: Layout | None = None
) -> torch.Tensor:
    """Fill a local tensor with its elements of a global normal tensor (inverse of the distribution function)."""
    for block, index in _index_blocks(tensor, layout):
        block.copy_(torch.special.ndtri(unit(stream, index)) * std + mean)
    return tensor


@torch.no_grad()
def truncated_normal_(
    tensor: torch.Tensor,
    stream: int,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    *,
    layout: Layout | None = None,
) -> torch.Tensor:
    """Fill as `normal_` does, restricted to [low, high] (absolute bounds, as in `torch.nn.init.trunc_normal_`)."""
    a, b = (0.5 * (1 + math.erf((x - mean) / (std * math.sqrt(2)))) for x in (low, high))
    for block, index in _index_blocks(tensor, layout):
        block.copy_((torch.special.ndtri(unit(stream, index) * (b - a) + a) * std + mean).clamp_(low, high))
    return tensor


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, stream, layout):
        ctx.args = (p, stream, layout)
        return _drop(x, p, stream, layout)

    @staticmethod
    def backward(ctx, grad):
        return _drop(grad, *ctx.args), None, None, None


def _drop(x: torch.Tensor, p: float, stream: int, layout: Layout) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for (block, index), (source, _) in zip(_index_blocks(out, layout), _index_blocks(x, layout), strict=True):
        block.copy_(torch.where(unit(stream, index) >= p, source / (1.0 - p), 0.0))
    return out


def dropout(x: torch.Tensor, p: float, stream: int, *, layout: Layout | None = None) -> torch.Tensor:
    """Dropout whose mask is that of the global tensor: ranks that hold the same elements drop the same ones.

    `stream` is `key(seed, step, name)`; `layout` describes the local activation (None: it is full). The mask is
    drawn again in backward, so nothing is kept for it. Runs as a few elementwise passes of torch.
    """
    if p <= 0.0:
        return x
    return _Dropout.apply(x, p, stream, layout or Layout(tuple(x.shape)))


def permutation(n: int, stream: int) -> torch.Tensor:
    """A random order of 0..n-1, int64."""
    return torch.argsort(bits(stream, torch.arange(n)), stable=True)


def seed_torch(seed: int, step: int, indices: Mapping[str, int] | None = None) -> None:
    """Seed torch's own generators for one step, for code that draws from them.

    `indices` are this rank's indices along the axes whose ranks must draw differently (data axes and `pp`, not a
    `tp` over which activations are replicated). Called at the start of every step, it makes the stream a function
    of (seed, step, axis indices), so a resumed run draws what an uninterrupted one would have.
    """
    named = [part for axis, index in sorted((indices or {}).items()) for part in (axis, index)]
    torch.manual_seed(key(seed, step, *named))
