"""Rotary position embedding in Triton: a program takes a token, every head of q and k, with its angles read once."""

from __future__ import annotations

import math

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2
from cai_kernels.ops import define

# Of the heads that a program holds at once: 16 values a thread, and where heads divide into groups 1024 in all. At
# 32 + 8 heads of 128 a program a token is 91 % of a copy's bandwidth, groups are 93 % (H200, Triton 3.6).
WARP_VALUES, GROUP_VALUES = 512, 1024


@triton.jit
def _read(x_ptr, first, sizes, HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The rotated values of HEADS heads: both halves, or whole heads of which pairs are neighbours."""
    heads, stride, half = sizes
    head = first + tl.arange(0, HEADS)[:, None]
    row = x_ptr + head * stride
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF)[None, :]
        return (tl.load(row + at, mask=(head < heads) & (at < 2 * half), other=0.0),)
    else:
        at = tl.arange(0, HALF)[None, :]
        inside = (head < heads) & (at < half)
        return tl.load(row + at, mask=inside, other=0.0), tl.load(row + half + at, mask=inside, other=0.0)


@triton.jit
def _write(y_ptr, x, first, angles, sizes, INTERLEAVED: tl.constexpr):
    """Rotate what `_read` gave and store it."""
    cos, sin = angles
    heads, stride, half = sizes
    HEADS: tl.constexpr = x[0].shape[0]
    HALF: tl.constexpr = cos.shape[1]
    head = first + tl.arange(0, HEADS)[:, None]
    row = y_ptr + head * stride
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF)[None, :]
        a, b = tl.split(tl.reshape(x[0].to(tl.float32), (HEADS, HALF, 2)))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * HALF))
        tl.store(row + at, y.to(y_ptr.dtype.element_ty), mask=(head < heads) & (at < 2 * half))
    else:
        at = tl.arange(0, HALF)[None, :]
        inside = (head < heads) & (at < half)
        a, b = x[0].to(tl.float32), x[1].to(tl.float32)
        tl.store(row + at, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(row + half + at, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turn(x_ptr, y_ptr, angles, sizes, HEADS: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate the heads of one token, HEADS at a time; copy what is not rotated."""
    heads, x_stride, y_stride, half, tail = sizes
    HALF: tl.constexpr = angles[0].shape[1]
    for first in range(0, heads, HEADS):
        x = _read(x_ptr, first, (heads, x_stride, half), HEADS, HALF, INTERLEAVED)
        _write(y_ptr, x, first, angles, (heads, y_stride, half), INTERLEAVED)
        if TAIL:
            head = first + tl.arange(0, HEADS)[:, None]
            at = tl.arange(0, TAIL)[None, :]
            inside = (head < heads) & (at < tail)
            tail_values = tl.load(x_ptr + head * x_stride + 2 * half + at, mask=inside, other=0.0)
            tl.store(y_ptr + head * y_stride + 2 * half + at, tail_values, mask=inside)


@triton.jit
def _angles(tables, strides, batch, row, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The cosines and sines of a token, HEADS times: as heads are held, so that no thread asks another for them."""
    cos_ptr, sin_ptr = tables
    of_cos, of_sin = strides
    at = tl.arange(0, HALF)[None, :] + tl.zeros((HEADS, 1), dtype=tl.int32)
    cos_at = cos_ptr + batch * of_cos[0] + row * of_cos[1] + at * of_cos[2]
    sin_at = sin_ptr + batch * of_sin[0] + row * of_sin[1] + at * of_sin[2]
    cos = tl.load(cos_at, mask=at < half, other=0.0)
    return cos, tl.load(sin_at, mask=at < half, other=0.0)


@triton.jit
def _turn_group(x_ptr, y_ptr, angles, first, strides, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate HEADS heads from `first` on, with nothing to mask."""
    HALF: tl.constexpr = angles[0].shape[1]
    x = _read(x_ptr, first, (first + HEADS, strides[0], HALF), HEADS, HALF, INTERLEAVED)
    _write(y_ptr, x, first, angles, (first + HEADS, strides[1], HALF), INTERLEAVED)


@triton.jit
def _rotate(
    tensors,
    strides,
    shape,
    GROUP: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """A program turns GROUP heads of a token, of q or of k; or with 0 all of them, Q_HEADS and K_HEADS at a time."""
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr = tensors
    of_q, of_k, of_q_out, of_k_out, of_cos, of_sin, of_position = strides
    length, q_heads, k_heads, half, tail = shape
    program, first = tl.program_id(0), 0
    if GROUP > 0:
        groups = (q_heads + k_heads) // GROUP
        program, first = program // groups, program % groups * GROUP
    batch = (program // length).to(tl.int64)
    token = (program % length).to(tl.int64)
    row = token
    if position_ptr is not None:
        row = tl.load(position_ptr + batch * of_position[0] + token * of_position[1]).to(tl.int64)
    cos, sin = _angles((cos_ptr, sin_ptr), (of_cos, of_sin), batch, row, half, max(GROUP, 1), HALF)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if INVERSE:
        sin = -sin
    q_ptr += batch * of_q[0] + token * of_q[2]
    k_ptr += batch * of_k[0] + token * of_k[2]
    q_out_ptr += batch * of_q_out[0] + token * of_q_out[2]
    k_out_ptr += batch * of_k_out[0] + token * of_k_out[2]
    if GROUP > 0:
        if first < q_heads:
            _turn_group(q_ptr, q_out_ptr, (cos, sin), first, (of_q[1], of_q_out[1]), GROUP, INTERLEAVED)
        else:
            first -= q_heads
            _turn_group(k_ptr, k_out_ptr, (cos, sin), first, (of_k[1], of_k_out[1]), GROUP, INTERLEAVED)
    else:
        sizes = (q_heads, of_q[1], of_q_out[1], half, tail)
        _turn(q_ptr, q_out_ptr, (cos, sin), sizes, Q_HEADS, TAIL, INTERLEAVED)
        sizes = (k_heads, of_k[1], of_k_out[1], half, tail)
        _turn(k_ptr, k_out_ptr, (cos, sin), sizes, K_HEADS, TAIL, INTERLEAVED)


def _group(q_heads: int, k_heads: int, size: int) -> int:
    """Heads of a program where both divide by them: a power of two, GROUP_VALUES at most and half of that at least."""
    group_heads = math.gcd(q_heads, k_heads)
    group_heads = min(group_heads & -group_heads, max(GROUP_VALUES // size, 1))
    return group_heads if GROUP_VALUES <= 2 * group_heads * size <= 2 * GROUP_VALUES else 0


def _at_once(heads: int, size: int) -> int:
    """Heads in a tile: the power of two with few left over and few tiles, at most 4096 values."""
    choices = [tile for tile in (32, 16, 8, 4, 2, 1) if tile * size <= 4096 and tile <= power_of_2(heads)]
    return min(choices or [1], key=lambda tile: triton.cdiv(max(heads, 1), tile) * (tile + 4))


def _table(table: torch.Tensor, interleaved: bool, rotary_dim: int) -> tuple[int, int, int]:
    """Strides over batch, rows and pairs."""
    batch = table.stride(0) if table.dim() == 3 and table.shape[0] > 1 else 0
    step = 2 if interleaved and table.shape[-1] == rotary_dim else 1
    return batch, table.stride(-2), table.stride(-1) * step


def _rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, N, S, H], k [B, K, S, H] -> both rotated, or rotated back with `inverse`."""
    q_out, k_out = _like(q), _like(k)
    batch, q_heads, length, size = q.shape
    if batch * length == 0:
        return q_out, k_out
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    of_position = (0, 0)
    if position_ids is not None:
        full_positions = position_ids.expand(batch, length)
        of_position = (full_positions.stride(0), full_positions.stride(1))
    tensors = (q, k, q_out, k_out, cos, sin, position_ids)
    tables = [_table(table, interleaved, rotary_dim) for table in (cos, sin)]
    strides = (*(t.stride()[:3] for t in tensors[:4]), *tables, of_position)
    tail = size - rotary_dim
    half = rotary_dim // 2
    group = _group(q_heads, k.shape[1], size) if not tail and half == power_of_2(half) else 0
    q_at_once, k_at_once = _at_once(q_heads, size), _at_once(k.shape[1], size)
    programs = batch * length * ((q_heads + k.shape[1]) // group if group else 1)
    launch = _rotate[(programs,)]  # pyright: ignore[reportIndexIssue]
    launch(
        tensors,
        strides,
        (length, q_heads, k.shape[1], half, tail),
        GROUP=group,
        Q_HEADS=q_at_once,
        K_HEADS=k_at_once,
        HALF=power_of_2(half),
        TAIL=power_of_2(tail) if tail else 0,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=min(max(power_of_2((group or q_at_once) * size) // WARP_VALUES, 1), 8),
        maxnreg=32 if group and q.element_size() == k.element_size() == 2 else None,
    )
    return q_out, k_out


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape)


def _empty(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q), _like(k)


def _save(ctx, inputs, output) -> None:
    q, k, cos, sin, position_ids, *ctx.form = inputs
    ctx.save_for_backward(cos, sin, position_ids)
    ctx.dtypes = (q.dtype, k.dtype)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dq, dk):
    cos, sin, position_ids = ctx.saved_tensors
    rotary_dim, interleaved, inverse = ctx.form
    gradients = [d if need else None for d, need in zip((dq, dk), ctx.needs_input_grad, strict=False)]
    present_gradient = next((d for d in gradients if d is not None), None)
    if present_gradient is None:
        return (None,) * 8
    # What has no gradient is of no heads: nothing is done for it.
    batch, _, length, size = present_gradient.shape
    dq, dk = (
        present_gradient.new_empty(batch, 0, length, size, dtype=dtype) if d is None else d
        for d, dtype in zip(gradients, ctx.dtypes, strict=True)
    )
    turned = rope(dq, dk, cos, sin, position_ids, rotary_dim, interleaved, not inverse)
    return *(t if d is not None else None for t, d in zip(turned, gradients, strict=True)), *(None,) * 6


rope = define(_rope, _empty, save=_save, backward=_differentiate, twice=_differentiate)
