"""The kernels of adaptive layer norm and its gate in Triton; `modulate.triton` launches them.

A program stays in one sample, so that its scale and shift, or its gate, are loaded once. Backward walks down tokens and
keeps the sums over them in registers; they are added up by `column_sums`, without atomics.
"""

from __future__ import annotations

from cai_kernels.compiler import tl, triton


@triton.jit
def _rows(parts, tokens, first, ROWS: tl.constexpr):
    """(sample, rows of [N * T], which are there) of a program's block of tokens."""
    sample = tl.program_id(0) // parts
    token = first * ROWS + tl.arange(0, ROWS)
    return sample, sample.to(tl.int64) * tokens + token, token < tokens


@triton.jit
def modulate(inputs, outputs, sizes, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr, scale_ptr, shift_ptr = inputs
    y_ptr, mean_ptr, rstd_ptr = outputs
    parts, tokens, columns, scale_stride, shift_stride = sizes
    sample, row, real = _rows(parts, tokens, tl.program_id(0) % parts, ROWS)
    at = tl.arange(0, BLOCK)
    live = at < columns
    inside = real[:, None] & live[None, :]
    to = row[:, None] * columns + at[None, :]
    x = tl.load(x_ptr + to, mask=inside, other=0.0).to(tl.float32)
    sample_index = sample.to(tl.int64)
    scale = tl.load(scale_ptr + sample_index * scale_stride + at, mask=live, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + sample_index * shift_stride + at, mask=live, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / columns
    x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + eps)
    tl.store(mean_ptr + row, mean, mask=real)
    tl.store(rstd_ptr + row, rstd, mask=real)
    y = x * rstd[:, None] * (1.0 + scale)[None, :] + shift[None, :]
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def modulate_backward(
    inputs, outputs, sizes, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradient of x, and sums over a program's tokens of those of scale and shift, [parts, N, C]."""
    dy_ptr, x_ptr, scale_ptr, mean_ptr, rstd_ptr = inputs
    dx_ptr, dscale_ptr, dshift_ptr = outputs
    parts, tokens, columns, scale_stride, samples = sizes
    at = tl.arange(0, BLOCK)
    live = at < columns
    part, of = tl.program_id(0) % parts, tl.program_id(0) // parts
    sample_scale_ptr = scale_ptr + of.to(tl.int64) * scale_stride
    dscale = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    dshift = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for block in tl.range(part, tl.cdiv(tokens, ROWS), parts, num_stages=STAGES):
        _, row, real = _rows(parts, tokens, block, ROWS)
        inside = real[:, None] & live[None, :]
        to = row[:, None] * columns + at[None, :]
        x = tl.load(x_ptr + to, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + to, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=real, other=0.0)[:, None]
        x = (x - tl.load(mean_ptr + row, mask=real, other=0.0)[:, None]) * rstd
        if dscale_ptr is not None:
            dscale += dy * x
        if dshift_ptr is not None:
            dshift += dy
        if dx_ptr is not None:
            # again for every row: kept, it would take the registers of the sums
            scale = tl.load(sample_scale_ptr + at, mask=live, other=0.0).to(tl.float32)
            dy *= (1.0 + scale)[None, :]
            dx = dy - x * (tl.sum(dy * x, 1) / columns)[:, None] - (tl.sum(dy, 1) / columns)[:, None]
            tl.store(dx_ptr + to, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    to = (part.to(tl.int64) * samples + of) * columns + at
    if dscale_ptr is not None:
        tl.store(dscale_ptr + to, tl.sum(dscale, 0), mask=live)
    if dshift_ptr is not None:
        tl.store(dshift_ptr + to, tl.sum(dshift, 0), mask=live)


@triton.jit
def gate_add(inputs, y_ptr, sizes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    residual_ptr, x_ptr, gate_ptr = inputs
    parts, tokens, columns, gate_stride = sizes
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < columns
    sample, row, real = _rows(parts, tokens, tl.program_id(0) % parts, ROWS)
    gate = tl.load(gate_ptr + sample.to(tl.int64) * gate_stride + at, mask=live, other=0.0).to(tl.float32)
    inside = real[:, None] & live[None, :]
    to = row[:, None] * columns + at[None, :]
    x = tl.load(x_ptr + to, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + to, mask=inside, other=0.0).to(tl.float32)
    y = residual + gate[None, :] * x
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_add_backward(
    inputs, outputs, sizes, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradient of x, and sums over a program's tokens of that of gate, [parts, N, C]."""
    dy_ptr, x_ptr, gate_ptr = inputs
    dx_ptr, dgate_ptr = outputs
    parts, tokens, columns, gate_stride, samples = sizes
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < columns
    part, of = tl.program_id(0) % parts, tl.program_id(0) // parts
    gate = tl.load(gate_ptr + of.to(tl.int64) * gate_stride + at, mask=live, other=0.0).to(tl.float32)
    dgate = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for block in tl.range(part, tl.cdiv(tokens, ROWS), parts, num_stages=STAGES):
        _, row, real = _rows(parts, tokens, block, ROWS)
        inside = real[:, None] & live[None, :]
        to = row[:, None] * columns + at[None, :]
        dy = tl.load(dy_ptr + to, mask=inside, other=0.0).to(tl.float32)
        if dgate_ptr is not None:
            dgate += dy * tl.load(x_ptr + to, mask=inside, other=0.0).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + to, (dy * gate[None, :]).to(dx_ptr.dtype.element_ty), mask=inside)
    if dgate_ptr is not None:
        to = (part.to(tl.int64) * samples + of) * columns + at
        tl.store(dgate_ptr + to, tl.sum(dgate, 0), mask=live)
