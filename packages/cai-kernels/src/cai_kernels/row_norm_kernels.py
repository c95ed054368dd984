"""The kernels of norms of rows in Triton; `row_norm` launches them.

KIND is "llama" (RMS, rounded to x's dtype before the weight), "gemma" (RMS, weight + 1, one rounding at the end) or
"layer" (mean and variance, bias). Pointers that are None are of what a kind or a call does not have.
"""

from __future__ import annotations

from cai_kernels.compiler import tl, triton
from cai_kernels.tiles import launch_dependents


@triton.jit
def _load(ptr, inside, EVEN: tl.constexpr):
    """Load values, zeros outside; with EVEN nothing is masked, which saves the registers of the mask."""
    return tl.load(ptr) if EVEN else tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def _store(ptr, value, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr, value)
    else:
        tl.store(ptr, value, mask=inside)


@triton.jit
def _weighted(
    normalized, parameters, at, inside, y_ptr, x_ptr, KIND: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Multiply by the weight and add the bias. `parameters` are pointers or None; with AHEAD they are loaded values."""
    if KIND == "llama":
        normalized = normalized.to(x_ptr.dtype.element_ty).to(tl.float32)
    w, b = parameters
    if w is not None:
        w = w if AHEAD else _load(w + at, inside, EVEN)
        w = w.to(tl.float32)
        normalized *= w + 1.0 if KIND == "gemma" else w
    if b is not None:
        b = b if AHEAD else _load(b + at, inside, EVEN)
        normalized += b.to(tl.float32)
    return normalized.to(y_ptr.dtype.element_ty)


@triton.jit
def forward(
    inputs, outputs, shape, eps,
    KIND: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, residual_ptr, w_ptr, b_ptr = inputs
    y_ptr, sum_ptr, mean_ptr, rstd_ptr = outputs
    rows, columns, x_stride, residual_stride = shape
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    real, live = row < rows, at < columns
    inside = real[:, None] & live
    x = _load(x_ptr + row[:, None] * x_stride + at, inside, EVEN)
    if residual_ptr is not None:
        r = _load(residual_ptr + row[:, None] * residual_stride + at, inside, EVEN)
        x = (x.to(tl.float32) + r.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        _store(sum_ptr + row[:, None] * columns + at, x, inside, EVEN)
    parameters = (w_ptr, b_ptr)
    if AHEAD:
        parameters = (_load(w_ptr + at, live, EVEN), _load(b_ptr + at, live, EVEN))
    wide = x.to(tl.float32)
    if KIND == "layer":
        mean = tl.sum(wide, 1) / columns
        _store(mean_ptr + row, mean, real, EVEN)
        wide -= mean[:, None]
        if not EVEN:
            wide = tl.where(inside, wide, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / columns + eps)
    _store(rstd_ptr + row, rstd, real, EVEN)
    y = _weighted(wide * rstd[:, None], parameters, at, live, y_ptr, x_ptr, KIND, EVEN, AHEAD)
    _store(y_ptr + row[:, None] * columns + at, y, inside, EVEN)


@triton.jit
def forward_wide(inputs, outputs, shape, eps, KIND: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr, residual_ptr, w_ptr, b_ptr = inputs
    y_ptr, sum_ptr, mean_ptr, rstd_ptr = outputs
    columns, x_stride, residual_stride = shape
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0)
        if residual_ptr is not None:
            r = tl.load(residual_ptr + row * residual_stride + at, mask=at < columns, other=0.0)
            x = (x.to(tl.float32) + r.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * columns + at, x, mask=at < columns)
        total += x.to(tl.float32)
        squares += x.to(tl.float32) * x.to(tl.float32)
    mean = tl.sum(total, 0) / columns
    if KIND == "layer":
        tl.store(mean_ptr + row, mean)
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32)
            centred = tl.where(at < columns, x - mean, 0.0)
            squares += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            r = tl.load(residual_ptr + row * residual_stride + at, mask=at < columns, other=0.0)
            x = (x + r.to(tl.float32)).to(sum_ptr.dtype.element_ty).to(tl.float32)
        if KIND == "layer":
            x -= mean
        y = _weighted(x * rstd, (w_ptr, b_ptr), at, at < columns, y_ptr, x_ptr, KIND, False, False)
        tl.store(y_ptr + row * columns + at, y, mask=at < columns)


@triton.jit
def _read(ptr, inside, EVEN: tl.constexpr):
    return _load(ptr, inside, EVEN).to(tl.float32)


@triton.jit
def backward(
    inputs,
    outputs,
    shape,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dsum_ptr = inputs
    dx_ptr, dw_ptr, db_ptr = outputs
    rows, columns, dy_stride, x_stride, dsum_stride = shape
    at = tl.arange(0, BLOCK)[None, :]
    live = at < columns
    if dw_ptr is not None:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for block in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        real = row < rows
        inside = real[:, None] & live
        x = _read(x_ptr + row[:, None] * x_stride + at, inside, EVEN)
        dy = _read(dy_ptr + row[:, None] * dy_stride + at, inside, EVEN)
        rstd = _read(rstd_ptr + row, real, EVEN)[:, None]
        if KIND == "layer":
            x -= _read(mean_ptr + row, real, EVEN)[:, None]
        x *= rstd
        if dw_ptr is not None:
            dw += dy * x
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None:
            # The weight again for every row: kept, it would take too many registers. Loads within a branch are not
            # fetched ahead to shared memory, past the L1 cache; so this one does not load the L2 cache with every row.
            if w_ptr is not None:
                w = tl.zeros((1, BLOCK), dtype=tl.float32)
                if rows > 0:
                    w = _read(w_ptr + at, live, EVEN)
                dy *= w + 1.0 if KIND == "gemma" else w
            dx = dy - x * (tl.sum(dy * x, 1) / columns)[:, None]
            if KIND == "layer":
                dx -= (tl.sum(dy, 1) / columns)[:, None]
            dx *= rstd
            if dsum_ptr is not None:
                dx += _read(dsum_ptr + row[:, None] * dsum_stride + at, inside, EVEN)
            dx = dx.to(dx_ptr.dtype.element_ty)
            _store(dx_ptr + row[:, None] * columns + at, dx, inside, EVEN)
    launch_dependents(PDL)
    at = tl.arange(0, BLOCK)
    if dw_ptr is not None:
        tl.store(dw_ptr + program * columns + at, tl.sum(dw, 0), mask=at < columns)
    if db_ptr is not None:
        tl.store(db_ptr + program * columns + at, tl.sum(db, 0), mask=at < columns)


@triton.jit
def backward_wide(inputs, dx_ptr, shape, KIND: tl.constexpr, BLOCK: tl.constexpr):
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dsum_ptr = inputs
    columns, dy_stride, x_stride, dsum_stride = shape
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.load(mean_ptr + row) if KIND == "layer" else 0.0
    along = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = (tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if w_ptr is not None:
            w = tl.load(w_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
            dy *= w + 1.0 if KIND == "gemma" else w
        along += dy * x
        total += dy
    projection = tl.sum(along, 0) / columns
    shift = tl.sum(total, 0) / columns if KIND == "layer" else 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = (tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if w_ptr is not None:
            w = tl.load(w_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
            dy *= w + 1.0 if KIND == "gemma" else w
        dx = (dy - shift - x * projection) * rstd
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * dsum_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def parameters_wide(inputs, outputs, shape, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Weight and bias gradients of a block of columns, summed over every P-th block of rows."""
    dy_ptr, x_ptr, mean_ptr, rstd_ptr = inputs
    dw_ptr, db_ptr = outputs
    rows, columns, dy_stride, x_stride = shape
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1).to(tl.int64)
    if dw_ptr is not None:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for block in tl.range(part, tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=3):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
        if db_ptr is not None:
            db += dy
        if dw_ptr is not None:
            x = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
            if KIND == "layer":
                x -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
            dw += dy * x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
    if dw_ptr is not None:
        tl.store(dw_ptr + part * columns + at, tl.sum(dw, 0), mask=at < columns)
    if db_ptr is not None:
        tl.store(db_ptr + part * columns + at, tl.sum(db, 0), mask=at < columns)
