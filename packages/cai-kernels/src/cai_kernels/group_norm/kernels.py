"""The kernels of group norms in Triton; `group_norm.triton` launches them.

A sample is a tile or tiles of [channels, positions]; LAST says that channels are neighbours in memory, else positions.
A group that fits into the registers of one program is read once (`whole`, `whole_backward`). Of a larger one, programs
sum each channel over a part of the positions (`statistics`, `sums`), one program joins the parts of a group (`join`,
`join_sums`), and others write the results (`apply`, `apply_backward`). Nothing is added atomically.
"""

from __future__ import annotations

from cai_kernels.activations import activation
from cai_kernels.compiler import tl, triton


@triton.jit
def _offsets(channels, positions, LAST: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr):
    """Offsets of a tile's values from its first."""
    channel, position = tl.arange(0, CHANNELS)[:, None], tl.arange(0, POSITIONS)[None, :]
    return position * channels + channel if LAST else channel * positions + position


@triton.jit
def _first(sample, channel, position, channels, positions, LAST: tl.constexpr):
    """Offset of a tile's first value, in 64 bits."""
    start = sample.to(tl.int64) * channels * positions
    if LAST:
        return start + tl.cast(position, tl.int64) * channels + channel
    return start + tl.cast(channel, tl.int64) * positions + position


@triton.jit
def _vector(ptr, at, inside, default: tl.constexpr):
    """Values of a parameter of the channels as a column; `default` if there is none."""
    if ptr is None:
        return tl.full(at.shape, default, tl.float32)[:, None]
    else:
        return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _before_silu(dy, normalized, w, b, SILU: tl.constexpr, ROUNDED: tl.constexpr):
    """The gradient of w * normalized + b, from that of its SiLU."""
    if SILU:
        _, slope = activation(normalized * w + b, "silu", ROUNDED)
        dy *= slope
    return dy


@triton.jit
def _result(normalized, w, b, SILU: tl.constexpr, ROUNDED: tl.constexpr):
    y = normalized * w + b
    if SILU:
        y, _ = activation(y, "silu", ROUNDED)
    return y


@triton.jit
def whole(
    inputs, outputs, shape, eps,
    SILU: tl.constexpr, LAST: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """A program normalizes a group, [group_channels, positions] of a sample."""
    x_ptr, w_ptr, b_ptr = inputs
    y_ptr, mean_ptr, rstd_ptr = outputs
    channels, positions, groups, group_channels = shape
    group = tl.program_id(0)
    channel = (group % groups) * group_channels
    start = _first(group // groups, channel, 0, channels, positions, LAST)
    at = start + _offsets(channels, positions, LAST, CHANNELS, POSITIONS)
    real = tl.arange(0, CHANNELS) < group_channels
    inside = real[:, None] & (tl.arange(0, POSITIONS) < positions)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    count = group_channels * positions
    mean = tl.sum(tl.sum(x, 1), 0) / count
    x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) / count + eps)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)
    channel_index = channel + tl.arange(0, CHANNELS)
    w, b = _vector(w_ptr, channel_index, real, 1.0), _vector(b_ptr, channel_index, real, 0.0)
    y = _result(x * rstd, w, b, SILU, x_ptr.dtype.element_ty != tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def whole_backward(
    inputs, outputs, shape,
    SILU: tl.constexpr, LAST: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Gradients of a group, and a sample's sums [N, C] of those of weight and bias."""
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr = inputs
    dx_ptr, dw_ptr, db_ptr = outputs
    channels, positions, groups, group_channels = shape
    group = tl.program_id(0)
    channel = (group % groups) * group_channels
    start = _first(group // groups, channel, 0, channels, positions, LAST)
    at = start + _offsets(channels, positions, LAST, CHANNELS, POSITIONS)
    real = tl.arange(0, CHANNELS) < group_channels
    inside = real[:, None] & (tl.arange(0, POSITIONS) < positions)[None, :]
    channel_index = channel + tl.arange(0, CHANNELS)
    w, b = _vector(w_ptr, channel_index, real, 1.0), _vector(b_ptr, channel_index, real, 0.0)
    rstd = tl.load(rstd_ptr + group)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, (x - tl.load(mean_ptr + group)) * rstd, 0.0)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = _before_silu(dy, x, w, b, SILU, x_ptr.dtype.element_ty != tl.float32)
    along, total = tl.sum(dy * x, 1), tl.sum(dy, 1)
    to = (group // groups).to(tl.int64) * channels + channel_index
    if dw_ptr is not None:
        tl.store(dw_ptr + to, along, mask=real)
    if db_ptr is not None:
        tl.store(db_ptr + to, total, mask=real)
    if dx_ptr is not None:
        count = group_channels * positions
        projection = tl.sum(along[:, None] * w, 0) / count
        shift = tl.sum(total[:, None] * w, 0) / count
        dx = (dy * w - shift[None, :] - x * projection[None, :]) * rstd
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _place(channels, span, parts, CHANNELS: tl.constexpr):
    """(sample, part, first channel, first position) of a program that walks over a part of the positions."""
    blocks = tl.cdiv(channels, CHANNELS)
    part = tl.program_id(0) // blocks
    return part // parts, part, (tl.program_id(0) % blocks) * CHANNELS, (part % parts) * span


@triton.jit
def statistics(
    x_ptr, outputs, shape, LAST: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    """Mean and sum of squared distances from it of every channel in a part of the positions, [N, parts, C].

    Sums are of distances from the mean of the first tile, so that a large mean leaves the variance exact.
    """
    mean_ptr, squares_ptr = outputs
    channels, positions, span, parts = shape
    sample, part, channel, low = _place(channels, span, parts, CHANNELS)
    high = min(low + span, positions)
    at = _offsets(channels, positions, LAST, CHANNELS, POSITIONS)
    channel_index = channel + tl.arange(0, CHANNELS)
    real, position = channel_index < channels, tl.arange(0, POSITIONS)
    x_ptr += _first(sample, channel, low, channels, positions, LAST)
    inside = real[:, None] & (low + position < high)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    near = (tl.sum(x, 1) / min(high - low, POSITIONS))[:, None]
    total = tl.zeros((CHANNELS, POSITIONS), dtype=tl.float32)
    squares = tl.zeros((CHANNELS, POSITIONS), dtype=tl.float32)
    for first in tl.range(0, high - low, POSITIONS, num_stages=3):
        inside = real[:, None] & (low + first + position < high)[None, :]
        step = tl.cast(first, tl.int64) * channels if LAST else tl.cast(first, tl.int64)
        x = tl.load(x_ptr + step + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - near, 0.0)
        total += x
        squares += x * x
    count, moved = high - low, tl.sum(total, 1)
    to = part.to(tl.int64) * channels + channel_index
    tl.store(mean_ptr + to, tl.sum(near, 1) + moved / count, mask=real)
    tl.store(squares_ptr + to, tl.sum(squares, 1) - moved * moved / count, mask=real)


@triton.jit
def _parts_of(group, first, shape, BLOCK: tl.constexpr):
    """(offsets in [N, parts, C], channels, positions counted, which are there) of a group's partial sums."""
    channels, positions, span, parts, groups, group_channels = shape
    k = first + tl.arange(0, BLOCK)
    valid = k < parts * group_channels
    part, channel = k // group_channels, (group % groups) * group_channels + k % group_channels
    count = tl.where(valid, tl.minimum(positions - part * span, span), 0)
    return ((group // groups).to(tl.int64) * parts + part) * channels + channel, channel, count, valid


@triton.jit
def join(inputs, outputs, shape, eps, BLOCK: tl.constexpr):
    """Mean and reciprocal deviation of a group, of those of its channels in all parts (Chan et al., 1983)."""
    means_ptr, squares_ptr = inputs
    mean_ptr, rstd_ptr = outputs
    positions, parts, group_channels = shape[1], shape[3], shape[5]
    group = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, parts * group_channels, BLOCK):
        at, _, count, valid = _parts_of(group, first, shape, BLOCK)
        total += tl.load(means_ptr + at, mask=valid, other=0.0) * count
    mean = tl.sum(total, 0) / (group_channels * positions)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, parts * group_channels, BLOCK):
        at, _, count, valid = _parts_of(group, first, shape, BLOCK)
        apart = tl.load(means_ptr + at, mask=valid, other=0.0) - mean
        part_squares = tl.load(squares_ptr + at, mask=valid, other=0.0)
        squares += tl.maximum(part_squares, 0.0) + apart * apart * count
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, 1.0 / tl.sqrt(tl.sum(squares, 0) / (group_channels * positions) + eps))


@triton.jit
def _tile_of(tiles, channels, CHANNELS: tl.constexpr):
    """(sample, first channel, tile of positions) of a program that takes one tile."""
    blocks = tl.cdiv(channels, CHANNELS)
    rest = tl.program_id(0) // blocks
    return rest // tiles, (tl.program_id(0) % blocks) * CHANNELS, rest % tiles


@triton.jit
def apply(
    inputs, y_ptr, shape, SILU: tl.constexpr, LAST: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr = inputs
    channels, positions, groups, group_channels, tiles = shape
    sample, channel, tile = _tile_of(tiles, channels, CHANNELS)
    position = tile * POSITIONS + tl.arange(0, POSITIONS)
    channel_index = channel + tl.arange(0, CHANNELS)
    real = channel_index < channels
    inside = real[:, None] & (position < positions)[None, :]
    start = _first(sample, channel, tile * POSITIONS, channels, positions, LAST)
    at = start + _offsets(channels, positions, LAST, CHANNELS, POSITIONS)
    group = sample * groups + channel_index // group_channels
    w, b = _vector(w_ptr, channel_index, real, 1.0), _vector(b_ptr, channel_index, real, 0.0)
    mean, rstd = _vector(mean_ptr, group, real, 0.0), _vector(rstd_ptr, group, real, 0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = _result((x - mean) * rstd, w, b, SILU, x_ptr.dtype.element_ty != tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sums(
    inputs, outputs, shape, SILU: tl.constexpr, LAST: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    """Sums of dy * normalized and of dy (before SiLU) of every channel over a part of the positions, [N, parts, C]."""
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr = inputs
    along_ptr, total_ptr = outputs
    channels, positions, span, parts, groups, group_channels = shape
    sample, part, channel, low = _place(channels, span, parts, CHANNELS)
    high = min(low + span, positions)
    at = _offsets(channels, positions, LAST, CHANNELS, POSITIONS)
    at += _first(sample, channel, low, channels, positions, LAST)
    channel_index = channel + tl.arange(0, CHANNELS)
    real, position = channel_index < channels, tl.arange(0, POSITIONS)
    group = sample * groups + channel_index // group_channels
    w, b = _vector(w_ptr, channel_index, real, 1.0), _vector(b_ptr, channel_index, real, 0.0)
    mean, rstd = _vector(mean_ptr, group, real, 0.0), _vector(rstd_ptr, group, real, 0.0)
    along = tl.zeros((CHANNELS, POSITIONS), dtype=tl.float32)
    total = tl.zeros((CHANNELS, POSITIONS), dtype=tl.float32)
    for first in tl.range(0, high - low, POSITIONS, num_stages=3):
        inside = real[:, None] & (low + first + position < high)[None, :]
        step = tl.cast(first, tl.int64) * channels if LAST else tl.cast(first, tl.int64)
        x = tl.load(x_ptr + step + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + step + at, mask=inside, other=0.0).to(tl.float32)
        x = (x - mean) * rstd
        dy = _before_silu(dy, x, w, b, SILU, x_ptr.dtype.element_ty != tl.float32)
        along += dy * x
        total += dy
    to = part.to(tl.int64) * channels + channel_index
    tl.store(along_ptr + to, tl.sum(along, 1), mask=real)
    tl.store(total_ptr + to, tl.sum(total, 1), mask=real)


@triton.jit
def join_sums(inputs, outputs, shape, BLOCK: tl.constexpr):
    """The terms taken off dx in a group: the means of w * dy * normalized and of w * dy."""
    along_ptr, total_ptr, w_ptr = inputs
    projection_ptr, shift_ptr = outputs
    positions, parts, group_channels = shape[1], shape[3], shape[5]
    group = tl.program_id(0)
    projection = tl.zeros((BLOCK,), dtype=tl.float32)
    shift = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, parts * group_channels, BLOCK):
        at, channel, _, valid = _parts_of(group, first, shape, BLOCK)
        w = tl.sum(_vector(w_ptr, channel, valid, 1.0), 1)
        projection += tl.load(along_ptr + at, mask=valid, other=0.0) * w
        shift += tl.load(total_ptr + at, mask=valid, other=0.0) * w
    tl.store(projection_ptr + group, tl.sum(projection, 0) / (group_channels * positions))
    tl.store(shift_ptr + group, tl.sum(shift, 0) / (group_channels * positions))


@triton.jit
def apply_backward(
    inputs, dx_ptr, shape, SILU: tl.constexpr, LAST: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, projection_ptr, shift_ptr = inputs
    channels, positions, groups, group_channels, tiles = shape
    sample, channel, tile = _tile_of(tiles, channels, CHANNELS)
    position = tile * POSITIONS + tl.arange(0, POSITIONS)
    channel_index = channel + tl.arange(0, CHANNELS)
    real = channel_index < channels
    inside = real[:, None] & (position < positions)[None, :]
    start = _first(sample, channel, tile * POSITIONS, channels, positions, LAST)
    at = start + _offsets(channels, positions, LAST, CHANNELS, POSITIONS)
    group = sample * groups + channel_index // group_channels
    w, b = _vector(w_ptr, channel_index, real, 1.0), _vector(b_ptr, channel_index, real, 0.0)
    mean, rstd = _vector(mean_ptr, group, real, 0.0), _vector(rstd_ptr, group, real, 0.0)
    projection, shift = _vector(projection_ptr, group, real, 0.0), _vector(shift_ptr, group, real, 0.0)
    x = (tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = _before_silu(dy, x, w, b, SILU, x_ptr.dtype.element_ty != tl.float32)
    dx = (dy * w - shift - x * projection) * rstd
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
